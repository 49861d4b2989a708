"""The logs of jobs beyond this machine's disk: in an object store, or in a folder that several machines share (decision
0016). `parts`: the stored objects, which lines are in them, and their writer; `archived_log` reads them; `spool`: what
a control plane has on its own disk in the meantime; `archiver`: all jobs of one control plane."""
