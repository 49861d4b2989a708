"""An S3 server, for commands that read from and write to object stores."""

from s3_fixtures import bucket, s3_server  # noqa: F401 - fixtures
