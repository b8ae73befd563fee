"""Recipe -> the objects that the loop drives: model, optimizer, schedule, step, checkpoint writer."""

from __future__ import annotations
