"""Who is asked: one or several, each in its own words."""

import pytest

from manta.workers.node.cloud_notices import MetadataSource
from manta.workers.node.notice_sources import KubernetesSource, SlurmSource, UnknownSource, notice_sources


def test_notice_sources_have_default_settings_that_can_be_overridden():
    assert notice_sources("aws") == [MetadataSource("aws", "http://169.254.169.254")]
    assert notice_sources("gcp=http://there:80") == [MetadataSource("gcp", "http://there:80")]
    assert notice_sources("slurm") == [SlurmSource(600.0)]
    assert notice_sources("slurm=90") == [SlurmSource(90.0)]
    assert notice_sources("kubernetes") == [KubernetesSource({})]
    further = {"example.com/sold": 90.0, "example.com/rented": None}
    assert notice_sources("kubernetes=example.com/sold:90+example.com/rented") == [KubernetesSource(further)]


def test_notice_sources_are_separated_by_commas():
    assert [source.name for source in notice_sources("aws, kubernetes,slurm=5")] == ["aws", "kubernetes", "slurm"]


@pytest.mark.parametrize("text", [
    "", "AWS", "oracle", "aws=ftp://there", "aws=there", "aws,", "slurm=soon", "slurm=-1", "slurm=inf", "slurm=nan",
    "kubernetes=:5", "kubernetes=a:b", "kubernetes=a:-1", "kubernetes=a:inf", "kubernetes=a:nan",
])  # fmt: skip
def test_unknown_notice_source_is_refused_with_the_known_ones(text):
    with pytest.raises(UnknownSource, match=r"is not a known source of notices: use aws, gcp, azure, .* with commas$"):
        notice_sources(text)
