"""Medium of the disk tier: moves bytes between memory and segment files, in any process."""
