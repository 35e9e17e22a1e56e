"""`report.html`, comparisons of runs, and the server that follows a run."""

from mgrpo.telemetry.report.command import report_command, watch_command
from mgrpo.telemetry.report.page import page, write_report

__all__ = ["page", "report_command", "watch_command", "write_report"]
