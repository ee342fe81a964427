"""Every error a user can meet. Each message names the value, what was expected, the place, and the cure."""


class DraftsmithError(Exception):
    """Base of all errors raised for users; the command line prints its message as one line and exits with `exit_code`."""

    exit_code = 1


class UsageError(DraftsmithError):
    """The command or the configuration asks for something that cannot be meant."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file or override has an unknown key, a wrong type or values that contradict each other."""


class DataError(DraftsmithError):
    """Training or evaluation text cannot be read or teaches nothing."""


class TargetError(DraftsmithError):
    """The target model or its tokenizer cannot be loaded or lacks something that drafting needs."""


class CaptureError(DraftsmithError):
    """Hidden states of the target are missing or have an unexpected shape."""


class ServerError(DraftsmithError):
    """A server that is to write responses or give hidden states cannot be reached, or answers with something else."""


class RefusedPromptError(DraftsmithError):
    """A server will not answer this prompt, whatever it does with others. reason: in a few words, the same for many prompts."""

    def __init__(self, reason: str, told: str = "") -> None:
        super().__init__(told or reason)
        self.reason = reason


class CheckpointError(DraftsmithError):
    """A checkpoint cannot be written, is not complete, or does not fit the run."""


class PipelineError(DraftsmithError):
    """A worker failed, or could not be stopped; the cause is chained."""


class ReplicaError(PipelineError):
    """Drafter replicas are no longer bit-identical."""


class CompileError(PipelineError):
    """A graph was needed that the plan did not foresee, and the run was told to stop at one."""


class RunError(DraftsmithError):
    """A run cannot be started, reached or ended; the message tells what was seen."""
