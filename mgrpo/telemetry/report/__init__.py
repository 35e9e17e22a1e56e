"""`report.html`, comparisons of runs, and the server that follows a run."""

from mgrpo.telemetry.report.page import page, write_report
from mgrpo.telemetry.report.report_command import report_command, watch_command

__all__ = ["page", "report_command", "watch_command", "write_report"]
