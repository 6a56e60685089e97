"""Clients of the control routes: status, pause, rollback, abort."""
