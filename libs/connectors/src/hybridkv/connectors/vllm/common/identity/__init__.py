"""Facts for the fingerprint: named values of the engine's process that the stored bytes depend on.

`engine_facts` collects all of these. The facts of workers, the groups and the chunk length are added when the
fingerprint is built. This package reads no device, and no tensor except in `worker_facts`.
"""
