"""Looks at a machine and at what a service would use there, and says of each thing whether it will do, and if not, what
would help. `findings`: the answers. `machine`, `packages`, `stores`: what is looked at. `checkup`: all."""
