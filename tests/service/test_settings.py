"""Settings of a service, packages that models may come from, and counts of bytes in sentences."""

import re
from pathlib import Path

import pytest

from manta.service.control.options import ModelPackages
from manta.service.settings import InvalidSetting, RequestLimits, Settings, Tls, without_secrets
from manta.service.words import byte_count
from manta.workers.spec.reading import parse_job_spec
from manta.workers.storage.locations import ObjectPath


def test_settings_of_an_empty_environment_are_the_defaults():
    settings = Settings.from_environment({})
    assert settings == Settings(home=Path.home() / ".manta", url=None)


@pytest.mark.parametrize("name", ["MANTA_HOME", "MANTA_URL"])
def test_setting_with_an_empty_variable_has_its_default(name):
    assert Settings.from_environment({name: ""}) == Settings.from_environment({})


def test_home_setting_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_environment({"MANTA_HOME": "state", "MANTA_URL": "http://there"})
    assert (settings.home, settings.url) == (tmp_path / "state", "http://there")
    assert settings.service_file == tmp_path / "state" / "service.json"


def test_snapshots_of_failed_jobs_are_kept_a_day_or_as_configured():
    assert Settings.from_environment({}).failed_memory_hours == 24
    assert Settings.from_environment({"MANTA_FAILED_MEMORY_HOURS": "0.5"}).failed_memory_hours == 0.5


def test_home_that_the_locale_cannot_name_is_refused_with_advice():
    with pytest.raises(InvalidSetting, match=r"home .* cannot be named in this locale: set PYTHONUTF8=1"):
        Settings.from_environment({"MANTA_HOME": "/f\udcfc\udcdf"})


@pytest.mark.parametrize("value", ["a day", "-1", "nan", "inf", "1e6"])
def test_setting_with_invalid_hours_is_refused(value):
    with pytest.raises(InvalidSetting, match=f"MANTA_FAILED_MEMORY_HOURS is '{value}'"):
        Settings.from_environment({"MANTA_FAILED_MEMORY_HOURS": value})


def test_jobs_are_kept_forever_or_as_configured():
    assert Settings.from_environment({}).jobs_kept_days == 0
    assert Settings.from_environment({"MANTA_JOBS_KEPT_DAYS": "30"}).jobs_kept_days == 30
    with pytest.raises(InvalidSetting, match="MANTA_JOBS_KEPT_DAYS is 'a month'; it must be a number of 0 or more"):
        Settings.from_environment({"MANTA_JOBS_KEPT_DAYS": "a month"})


def test_checkpoint_setting_accepts_a_folder_or_object_store():
    read = Settings.from_environment
    assert read({}).checkpoints is read({"MANTA_CHECKPOINTS": ""}).checkpoints is None
    assert read({"MANTA_CHECKPOINTS": "s3://bucket/manta/"}).checkpoints == ObjectPath("s3", "bucket/manta")
    assert read({"MANTA_CHECKPOINTS": "/shared/manta"}).checkpoints == Path("/shared/manta")
    with pytest.raises(InvalidSetting, match="MANTA_CHECKPOINTS: ftp://there is in no store that Manta knows"):
        read({"MANTA_CHECKPOINTS": "ftp://there"})


def test_notice_setting_accepts_known_clouds():
    read = Settings.from_environment
    assert read({}).node_notices is None
    assert read({"MANTA_NODE_NOTICES": "aws"}).node_notices == "aws"
    several = "gcp=http://there:80,kubernetes=example.com/sold:90,slurm"
    assert read({"MANTA_NODE_NOTICES": several}).node_notices == several
    with pytest.raises(InvalidSetting, match="MANTA_NODE_NOTICES: 'ibm' is not a known source of notices: use aws,"):
        read({"MANTA_NODE_NOTICES": "ibm"})


def test_data_roots_setting_takes_absolute_folders_separated_by_colons():
    assert Settings.from_environment({}).data_roots is None
    read = Settings.from_environment({"MANTA_DATA_ROOTS": "/data:/srv/texts:"})
    assert read.data_roots == (Path("/data"), Path("/srv/texts"))
    assert Settings.from_environment({"MANTA_EXPORT_ROOTS": "/out"}).export_roots == (Path("/out"),)
    assert Settings.from_environment({}).export_roots == ()
    with pytest.raises(InvalidSetting, match="MANTA_EXPORT_ROOTS names out"):
        Settings.from_environment({"MANTA_EXPORT_ROOTS": "out"})
    with pytest.raises(InvalidSetting, match="MANTA_DATA_ROOTS names texts"):
        Settings.from_environment({"MANTA_DATA_ROOTS": "/data:texts"})


@pytest.mark.parametrize(("value", "shown"), [("1", False), ("0", True), ("", True)])
def test_dashboard_is_on_unless_its_setting_turns_it_off(value, shown):
    assert Settings.from_environment({"MANTA_NO_DASHBOARD": value}).dashboard is shown


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_fault_setting_is_off_by_default(value, allowed):
    assert Settings.from_environment({"MANTA_ALLOW_FAULTS": value}).allow_faults is allowed


def test_names_of_the_service_are_separated_by_commas():
    assert Settings.from_environment({}).allowed_hosts == ()
    named = Settings.from_environment({"MANTA_ALLOWED_HOSTS": " a.example, b.example ,,"})
    assert named.allowed_hosts == ("a.example", "b.example")
    good = ("a_b.example:8443", "127.0.0.1", "[fe80::1]:8400", "xn--mnchen-3ya.example")
    assert Settings.from_environment({"MANTA_ALLOWED_HOSTS": ",".join(good)}).allowed_hosts == good


@pytest.mark.parametrize(
    "host",
    ["https://a.example", "a.example/ui", "a.example:84x", "a:99999", "a:0", "a:", "a:1:2", "fe80::1", "*", "a b",
     "münchen.example"],
)  # fmt: skip
def test_name_of_the_service_that_no_request_could_have_is_refused(host):
    with pytest.raises(InvalidSetting, match=f"names '{re.escape(host)}'; it takes names such as manta.example.org,"):
        Settings.from_environment({"MANTA_ALLOWED_HOSTS": f"good.example,{host}"})


def test_snapshot_retention_of_failed_jobs_can_be_zero():
    assert Settings.from_environment({"MANTA_FAILED_MEMORY_HOURS": "0"}).failed_memory_hours == 0


def test_tls_is_the_services_own_or_that_of_a_proxy():
    assert Settings.from_environment({}).tls == Tls() and not Tls().is_used
    own = Settings.from_environment({"MANTA_TLS_CERT": "/a/cert.pem", "MANTA_TLS_KEY": "/a/key.pem"}).tls
    assert (own, own.is_used) == (Tls(Path("/a/cert.pem"), Path("/a/key.pem")), True)
    assert Settings.from_environment({"MANTA_TLS_TERMINATED": "1"}).tls.is_used
    with pytest.raises(InvalidSetting, match="a certificate needs its private key"):
        Settings.from_environment({"MANTA_TLS_CERT": "/a/cert.pem"})


@pytest.mark.parametrize(("text", "prefix"), [("", ""), ("/", ""), ("/manta/", "/manta"), ("/a.b/c", "/a.b/c")])
def test_path_prefix_is_a_path_without_a_slash_at_its_end(text, prefix):
    assert Settings.from_environment({"MANTA_PATH_PREFIX": text}).path_prefix == prefix
    for wrong in ("manta", "/a//b", "/..", "/a b", "https://manta.example.org/manta"):
        with pytest.raises(InvalidSetting, match=r"MANTA_PATH_PREFIX is .*; it takes a path such as /manta"):
            Settings.from_environment({"MANTA_PATH_PREFIX": wrong})


def test_trusted_proxies_setting_accepts_addresses_and_networks():
    named = Settings.from_environment({"MANTA_TRUSTED_PROXIES": "10.0.0.0/8, ::1,127.0.0.1"})
    assert named.trusted_proxies == ("10.0.0.0/8", "::1", "127.0.0.1")
    with pytest.raises(InvalidSetting, match=r"MANTA_TRUSTED_PROXIES names '\*'"):
        Settings.from_environment({"MANTA_TRUSTED_PROXIES": "*"})


def test_request_limit_settings_are_read_and_checked():
    given = {
        "MANTA_REQUESTS_PER_SECOND": "0.5", "MANTA_REQUESTS_AT_ONCE": "2", "MANTA_STREAMS_AT_ONCE": "1",
        "MANTA_ANONYMOUS_PER_SECOND": "0",
    }  # fmt: skip
    assert Settings.from_environment(given).limits == RequestLimits(0.5, 2, 1, 0.0)
    assert Settings.from_environment({}).limits == RequestLimits()
    for wrong in ("many", "-1", "nan"):
        with pytest.raises(InvalidSetting, match=f"MANTA_STREAMS_AT_ONCE is '{wrong}'"):
            Settings.from_environment({"MANTA_STREAMS_AT_ONCE": wrong})


def test_key_that_could_not_be_sent_is_refused_and_not_shown():
    assert Settings.from_environment({"MANTA_API_KEY": " manta_abc\n"}).api_key == "manta_abc"
    for key in ("clé", "a\nb", "a b", "a\x00b"):
        with pytest.raises(InvalidSetting, match=r"^MANTA_API_KEY is not a valid key: ") as caught:
            Settings.from_environment({"MANTA_API_KEY": key})
        assert key not in str(caught.value)


def test_key_of_the_client_is_not_printed_with_the_settings():
    settings = Settings.from_environment({"MANTA_API_KEY": "manta_secret"})
    assert settings.api_key == "manta_secret" and "manta_secret" not in repr(settings)


def test_service_environment_excludes_the_api_key(tmp_path):
    given = {"MANTA_API_KEY": "manta_secret", "MANTA_HOME": "elsewhere", "PATH": "/bin"}
    assert Settings(tmp_path).environment_of_service(given) == {"MANTA_HOME": str(tmp_path), "PATH": "/bin"}


def test_log_setting_defaults_to_the_checkpoint_object_store():
    read = Settings.from_environment
    store, other = {"MANTA_CHECKPOINTS": "s3://bucket/manta"}, {"MANTA_LOGS": "s3://logs/manta"}
    assert read(store).logs == ObjectPath("s3", "bucket/manta")
    assert (
        read({}).logs
        is read({"MANTA_CHECKPOINTS": "/shared"}).logs
        is read({**store, "MANTA_LOGS": "home"}).logs
        is None
    )
    assert read({**store, **other}).logs == read(other).logs == ObjectPath("s3", "logs/manta")
    assert read({"MANTA_LOGS": "/shared"}).logs == Path("/shared")
    with pytest.raises(InvalidSetting, match="MANTA_LOGS: gs://there is in no store that Manta knows"):
        read({"MANTA_LOGS": "gs://there"})


def test_trace_setting_takes_the_address_of_a_collector():
    read = Settings.from_environment
    assert read({}).traces is read({"MANTA_TRACES": " "}).traces is None
    for address in ("http://collector:4318", "https://there/otlp/v1/traces", "http://[::1]:4318"):
        assert read({"MANTA_TRACES": address}).traces == address


@pytest.mark.parametrize(
    "address", ["collector:4318", "grpc://collector:4317", "http://", "http://a:b", "http://a?b=c"]
)
def test_invalid_trace_collector_address_is_refused(address):
    with pytest.raises(
        InvalidSetting, match=r"MANTA_TRACES is '.*'; it takes the address of a collector such as http://"
    ):
        Settings.from_environment({"MANTA_TRACES": address})


def test_secrets_of_a_collector_are_not_in_its_address_and_no_jobs_business():
    with pytest.raises(InvalidSetting, match="OTEL_EXPORTER_OTLP_HEADERS can hold a secret") as refused:
        Settings.from_environment({"MANTA_TRACES": "https://me:hush@collector"})
    assert "hush" not in str(refused.value)
    assert without_secrets({"OTEL_EXPORTER_OTLP_HEADERS": "authorization=hush", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_nodes_that_can_be_added_are_declared_by_the_operator():
    assert Settings.from_environment({}).node_shapes == ()
    (shape,) = Settings.from_environment({"MANTA_NODE_SHAPES": "workers=4x8 slots"}).node_shapes
    assert str(shape) == "4 workers of 8 slots"
    with pytest.raises(
        InvalidSetting, match=r"MANTA_NODE_SHAPES: 'four' is not a list of nodes; write TYPE=COUNT x UNITS"
    ):
        Settings.from_environment({"MANTA_NODE_SHAPES": "four"})


def job(**model):
    shape = {"layers": 1, "hidden_size": 8, "heads": 1, "sequence_length": 8}
    return parse_job_spec({"model": {**shape, **model}, "data": {"source": "python-stdlib"}, "train": {"steps": 1}})


def custom(entrypoint):
    return job(family="custom", entrypoint=entrypoint)


@pytest.mark.parametrize("entrypoint", ["ours:build", "ours.deep.er:build", "team.public:f", "team.public.x:f"])
def test_model_of_a_listed_package_or_below_is_allowed(entrypoint):
    assert ModelPackages(("ours", "team.public")).problems(custom(entrypoint)) == []


@pytest.mark.parametrize("entrypoint", ["os:system", "ours2:build", "team:f", "team.publicity:f", "our:build"])
def test_model_of_a_package_that_is_not_listed_is_refused_by_name(entrypoint):
    (problem,) = ModelPackages(("ours", "team.public")).problems(custom(entrypoint))
    assert problem.path == "model.entrypoint"
    package = "its package is not in the service's MANTA_MODEL_PACKAGES (ours, team.public)"
    assert problem.rule == f"jobs may not use {entrypoint}: {package}"


def test_custom_models_are_refused_without_a_list_of_packages():
    assert ModelPackages().problems(job()) == []
    (problem,) = ModelPackages().problems(custom("ours:build"))
    assert "MANTA_MODEL_PACKAGES (not set)" in problem.rule


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * 2**30, "1.5 GiB"), (5 * 2**40, "5.0 TiB"),
    (5000 * 2**40, "5000.0 TiB"),
])  # fmt: skip
def test_byte_counts_are_written_in_the_largest_full_unit(count, text):
    assert byte_count(count) == text
