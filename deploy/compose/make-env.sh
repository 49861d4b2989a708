#!/bin/sh
# Writes what docker-compose.yml needs and no repository may hold: .env with random secrets, and a certificate that the
# machine signs itself. What is there already stays.
#
#   deploy/compose/make-env.sh [NAME ...]      names and addresses under which others reach this machine
set -eu
umask 077
cd "${MANTA_COMPOSE_FOLDER:-"$(dirname "$0")/../.."}"

secret() { openssl rand -hex 32; }

if [ ! -e .env ]; then
    cat >.env.part <<END
# Secrets of this installation: keep them as you keep the keys to its machine. Passwords are of letters and digits.
MANTA_POSTGRES_PASSWORD=$(secret)
MANTA_RAY_TOKEN=$(secret)
MANTA_S3_ACCESS_KEY=manta
MANTA_S3_SECRET_KEY=$(secret)
MANTA_ADMIN_KEY=manta_$(secret)
MANTA_PROMETHEUS_KEY=manta_$(secret)
MANTA_GRAFANA_PASSWORD=$(secret)
MANTA_NAME=${1:-localhost}
END
    mv .env.part .env
    echo "made .env; the admin key is MANTA_ADMIN_KEY there"
fi

certificate=${MANTA_TLS:-deploy/compose/tls/manta.pem}
if [ ! -e "$certificate" ]; then
    names="DNS:localhost,IP:127.0.0.1"
    for name in "$@"; do
        case $name in
        *[!0-9.]*) names="$names,DNS:$name" ;;
        *) names="$names,IP:$name" ;;
        esac
    done
    # Only root passes this folder; the gateway's user reads the file through its mount.
    mkdir -p -m 0700 "$(dirname "$certificate")"
    openssl ecparam -name prime256v1 -genkey -noout -out "$certificate.part"
    openssl req -x509 -batch -key "$certificate.part" -days 825 -subj "/CN=${1:-localhost}" \
        -addext "subjectAltName=$names" >>"$certificate.part"
    chmod 0644 "$certificate.part"
    mv "$certificate.part" "$certificate"
    echo "made $certificate for $names"
fi
