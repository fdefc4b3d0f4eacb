"""What `fit` would be given: its arguments, configuration files and environment, read without making anything."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningCLI
from typing_extensions import override


class FitArguments(LightningCLI):
    """The arguments of `fit`, by the parser of `fit`; what they describe is made where it is asked for."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """
        Args:
            arguments: of `fit`, without its name.

        Raises:
            SystemExit: the parser has said what is wrong.
        """
        with warnings.catch_warnings():
            # These are meant to differ from what is in sys.argv.
            warnings.filterwarnings("ignore", "LightningCLI's args parameter")
            super().__init__(
                L.LightningModule,
                L.LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,
                parser_kwargs={"default_env": True},
                save_config_callback=None,
                args=["fit", *arguments],
            )

    @property
    def of_fit(self) -> Namespace:
        """Their values; may be written to before something is made."""
        given: Namespace = self.config.fit
        return given

    def make(self) -> tuple[L.LightningModule, L.LightningDataModule | None, dict[str, Any]]:
        """Module, data and the Trainer's options, all new."""
        made = self.parser.instantiate_classes(self.config)
        return self._get(made, "model"), self._get(made, "data"), dict(self._get(made, "trainer"))

    def make_module(self) -> L.LightningModule:
        """The module alone, new."""
        made = self.parser.instantiate_classes(Namespace(fit=Namespace(model=self.of_fit.model), subcommand="fit"))
        module: L.LightningModule = made.fit.model
        return module

    @override
    def _set_seed(self) -> None:
        """Nothing is drawn yet."""

    @override
    def instantiate_classes(self) -> None:
        """Nothing yet: a Trainer would look for its devices, and data for its files."""

    # Private; read at lightning 2.6.6.
    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing: it is only read."""
