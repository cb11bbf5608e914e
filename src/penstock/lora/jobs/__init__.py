"""Many fine-tuning jobs on one base: `Jobs`."""

from penstock.lora.jobs._jobs import Jobs
from penstock.lora.jobs._report import JobReport, JobsReport

__all__ = ["JobReport", "Jobs", "JobsReport"]
