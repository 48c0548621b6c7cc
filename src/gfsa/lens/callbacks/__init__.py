"""The lens as a callback of training libraries; each module needs its library."""
