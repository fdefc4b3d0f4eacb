"""Which Mixture-of-Experts families transformers has, read off transformers itself.

`families()` lists the config types that describe a model with experts, `model_class` finds the model that such a
config builds. Nothing here is a copied list, so a family that a new transformers brings is seen.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

_MODELS = Path(transformers.__file__).parent / "models"


@cache
def families() -> list[str]:
    """The config types with experts, sorted.

    They are those with a `base_model_ep_plan`, and those with a field about experts whose modelling file defines a
    class `*Experts`. A multimodal config is not one: the text or vision config inside it is. Only folders whose source
    speaks of experts are imported; `test_no_family_is_overlooked` imports all.
    """
    candidates = [name for name in CONFIG_MAPPING_NAMES if _may_have_experts(model_type_to_module_name(name))]
    return sorted(name for name in candidates if is_family(name))


def is_family(name: str) -> bool:
    """Whether the config type describes a model with experts of its own."""
    config = CONFIG_MAPPING[name]
    if config.base_model_ep_plan:
        return True
    parts = [
        part
        for part in config.sub_configs.values()
        if issubclass(part, PreTrainedConfig) and part.model_type not in CONFIG_MAPPING_NAMES
    ]
    fields = [field for owner in (config, *parts) for field in owner.__dataclass_fields__]
    return any("expert" in field for field in fields) and _defines_experts(model_type_to_module_name(name))


def model_class(name: str) -> type[PreTrainedModel]:
    """The base model of a family: what AutoModel builds, or the model in its file that takes its config.

    Raises:
        LookupError: there is no such model, or more than one.
    """
    config = CONFIG_MAPPING[name]
    if config in MODEL_MAPPING:
        return MODEL_MAPPING[config]
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    found = [
        member
        for attribute, member in vars(module).items()
        if inspect.isclass(member)
        and attribute == member.__name__
        and issubclass(member, PreTrainedModel)
        and member.config_class is config
        and not re.search("PreTrainedModel$|For[A-Z]", attribute)
    ]
    found = [each for each in found if not any(each is not other and issubclass(each, other) for other in found)]
    if len(found) != 1:
        raise LookupError(f"{name}: {len(found)} models take its config: {[each.__name__ for each in found]}")
    return found[0]


@cache
def _defines_experts(folder: str) -> bool:
    return any(
        re.search(r"^class \w*Experts\b", path.read_text(), re.MULTILINE)
        for path in (_MODELS / folder).glob("modeling_*.py")
    )


@cache
def _may_have_experts(folder: str) -> bool:
    return _defines_experts(folder) or any(
        "base_model_ep_plan" in path.read_text() for path in (_MODELS / folder).glob("configuration_*.py")
    )
