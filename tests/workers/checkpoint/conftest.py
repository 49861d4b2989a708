"""An S3 server."""

from s3_fixtures import bucket, s3_server, wire, wired_bucket  # noqa: F401 - fixtures
