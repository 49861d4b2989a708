"""`python -m api.cli`: the `manta` command."""

from api.cli.main import main

main()
