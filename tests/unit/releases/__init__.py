"""Tests of the audit of releases."""
