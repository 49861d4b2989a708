"""`python -m workers.zygote`: the zygote of a node."""

import sys

from workers.zygote.server import main

sys.exit(main())
