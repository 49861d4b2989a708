"""Where durable files lie: in a folder of this machine, in one that all nodes share, or under a prefix of an object
store. `places`: how they are called. `files`: what can be done with them, alike; `local_files` and `object_files` do
it."""
