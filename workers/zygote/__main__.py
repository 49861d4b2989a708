"""`python -m manta.workers.zygote`: the zygote of a node."""

import sys

from manta.workers.zygote.server import main

sys.exit(main())
