"""The errors a user can cause or must be told about, each one clear line."""

from __future__ import annotations


class UserError(ValueError):
    """What was asked cannot be done; the message is one line that names the flag, field or tensor. Exit code 2."""


class UnsupportedModel(UserError):
    """The checkpoint needs something headrace does not have; said from its config, before any weight is read."""


class CheckpointError(UserError):
    """A tensor is missing, truncated, of a wrong shape or unknown; the message lists names."""


class QueueFull(UserError):
    """As many requests wait as may; what was asked can be asked again later."""


class Fault(RuntimeError):
    """Something broke that the user did not cause; the message is one line. Exit code 1."""


class PeerLost(Fault):
    """A wait on another rank ended: it died, or the deadline passed. Rarely the root cause of a failure."""
