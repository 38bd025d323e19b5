"""Manifests of an object store. The scheduler finds, writes and renews them, on the thread of the manifest store.

manifest_store.py   lookup client of an `ObjectIndex`
search.py           finds the last manifest of a path
writer.py           writes manifests and replaces bad ones
renewer.py          renews manifests in use
epochs.py           follows the epochs of the cache, and begins new ones
reader.py           reads manifests
paths.py            the prefixes and chunks that a manifest lists
loop.py             event loop of all requests, on its thread
"""
