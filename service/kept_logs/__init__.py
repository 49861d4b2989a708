"""The logs of jobs beyond this machine's disk: in an object store, or a folder that several machines share (decision
0016). `parts`: what lies there; `part_writer` writes it, `kept_log` reads it; `spool`: what a control plane has on its
own disk meanwhile, `line_marks` knows its lines; `keeper`: all jobs of one control plane."""
