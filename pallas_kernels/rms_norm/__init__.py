"""RMS norm, and in which order its squares are added up. ``dispatch.rms_norm_of`` chooses how."""
