"""The evaluation room: what a run left is found, prompted, scored and compared with its base model."""
