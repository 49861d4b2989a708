"""Checks a machine and what a service would use there: for each thing, whether it is sufficient, and if not, what would
help. `findings`: the results. `machine`, `packages`, `stores`: the checks. `checkup`: all of them."""
