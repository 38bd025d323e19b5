"""What tests share: models in plain Python that native code is compared with."""
