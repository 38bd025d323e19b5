"""The half of a disk tier that moves bytes: from memory to segment files and back, in any process."""
