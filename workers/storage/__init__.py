"""Where durable files are stored: in a folder of this machine, in one that all nodes share, or under a prefix of an
object store. `locations`: their names. `files`: the operations on them, the same for all kinds, implemented for
folders there and for object stores in `object_files`."""
