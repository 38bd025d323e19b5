"""Manifests of the object tier: finds, writes and renews them, on the thread of the manifest store."""
