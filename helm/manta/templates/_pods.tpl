{{/* What all pods have: rights, and the folders that can be written where the root file system cannot. */}}

{{- define "manta.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "manta.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
{{- end -}}

{{- define "manta.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ if kindIs "map" . }}{{ .name }}{{ else }}{{ . }}{{ end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Where pods run. Takes a part of the values. */}}
{{- define "manta.scheduling" -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $ $field }}
{{ $field }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- range $field := list "priorityClassName" "runtimeClassName" }}
{{- with index $ $field }}
{{ $field }}: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Takes the size of /dev/shm. */}}
{{- define "manta.writableVolumes" -}}
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {}}
- {name: state, emptyDir: {}}
- {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ . }}}}
{{- end -}}

{{- define "manta.writableMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/manta}
- {name: state, mountPath: /var/lib/manta}
- {name: shared-memory, mountPath: /dev/shm}
{{- end -}}

{{/* Checkpoints and data that lie on claims. The service looks at no data: only nodes mount it. Takes (root, whether it
     is a node). */}}
{{- define "manta.claimVolumes" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.checkpoints.claim.enabled }}
- {name: checkpoints, persistentVolumeClaim: {claimName: {{ include "manta.checkpointsClaim" $root }}}}
{{- end }}
{{- if index . 1 }}
{{- range $number, $each := $root.Values.data }}
- {name: data-{{ $number }}, persistentVolumeClaim: {claimName: {{ $each.claim }}, readOnly: true}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "manta.claimMounts" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.checkpoints.claim.enabled }}
- {name: checkpoints, mountPath: /checkpoints}
{{- end }}
{{- if index . 1 }}
{{- range $number, $each := $root.Values.data }}
- {name: data-{{ $number }}, mountPath: {{ $each.mountPath }}, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{/* A variable of the environment from a Secret. Takes (name, secret, key). */}}
{{- define "manta.secretVariable" -}}
- name: {{ index . 0 }}
  valueFrom: {secretKeyRef: {name: {{ index . 1 }}, key: {{ index . 2 }}}}
{{- end -}}

{{/* What lets a process into Ray. */}}
{{- define "manta.rayToken" -}}
- {name: RAY_AUTH_MODE, value: token}
{{ include "manta.secretVariable" (list "RAY_AUTH_TOKEN" (include "manta.raySecret" .) "auth_token") }}
{{- end -}}

{{/* What leads a process to the object store. */}}
{{- define "manta.objectStore" -}}
{{- with .Values.checkpoints }}
{{- if .credentialsSecret }}
{{ include "manta.secretVariable" (list "AWS_ACCESS_KEY_ID" .credentialsSecret "AWS_ACCESS_KEY_ID") }}
{{ include "manta.secretVariable" (list "AWS_SECRET_ACCESS_KEY" .credentialsSecret "AWS_SECRET_ACCESS_KEY") }}
{{- end }}
{{- with .endpointUrl }}
- {name: AWS_ENDPOINT_URL_S3, value: {{ . | quote }}}
{{- end }}
{{- with .region }}
- {name: AWS_DEFAULT_REGION, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "manta.databaseVariable" -}}
{{- $key := empty .Values.database.existingSecret | ternary "url" .Values.database.key -}}
{{ include "manta.secretVariable" (list "MANTA_DATABASE_URL" (include "manta.databaseSecret" .) $key) }}
{{- end -}}
