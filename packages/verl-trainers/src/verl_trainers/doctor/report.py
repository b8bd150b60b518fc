"""All that the doctor finds, as data: what must be fixed, what is worth knowing, and the tables behind it."""

from __future__ import annotations

from dataclasses import dataclass

from verl_contracts.plugins import FAMILIES
from verl_trainers.doctor.machine import MachineRow, examine_machine
from verl_trainers.doctor.plugins import PluginRow, inspect_plugins
from verl_trainers.doctor.software import SoftwareRow, examine_software

__all__ = ["ContractRow", "Diagnosis", "diagnose"]

BROUGHT_BY = {
    "verl_contracts.runtimes": "verl-runtime[ray]",
    "verl_contracts.llm_server_managers": "verl-rollout[torch]",
    "verl_contracts.agent_loop_managers": "verl-rollout[torch]",
    "verl_contracts.agent_loops": "verl-rollout[torch]",
    "verl_contracts.checkpoint_managers": "verl-ckpt-engine",
    "verl_contracts.weight_backends": "verl-ckpt-engine",
}
"""Entry-point group → what to install when nobody offers a plug-in in it; other groups are served from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractRow:
    """One family of plug-ins."""

    family: str
    version: str
    """Of the contract that is installed."""
    usable: tuple[str, ...]
    """Names of the plug-ins that meet it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found."""

    software: list[SoftwareRow]
    contracts: list[ContractRow]
    plugins: list[PluginRow]
    machine: list[MachineRow]
    must_fix: list[str]
    """One fix per line."""
    advice: list[str]


def diagnose() -> Diagnosis:
    """Examine this environment. Takes some seconds, for the imports of everything that is installed."""
    software, plugins, machine = examine_software(), inspect_plugins(), examine_machine()
    contracts = [
        ContractRow(
            family=family.name,
            version=family.contract_version,
            usable=tuple(row.name for row in plugins if row.family == family.name and row.problem is None),
        )
        for family in FAMILIES.values()
    ]
    must_fix = [row.fix for row in software if row.fix is not None]
    unusable = [row for row in plugins if row.problem is not None]
    absent: dict[str, list[str]] = {}
    for family, contract in zip(FAMILIES.values(), contracts, strict=True):
        if family.default is not None and not contract.usable:
            reasons = [row.problem for row in unusable if row.family == family.name]
            if reasons:
                must_fix.append(f"no {family.name} can be used: {reasons[0]}")
            else:
                absent.setdefault(BROUGHT_BY.get(family.group, "verl-trainers"), []).append(family.name)
    must_fix += [f"pip install '{package}'   # brings the {', '.join(names)}" for package, names in absent.items()]
    advice = [row.advice for row in machine if row.advice is not None]
    advice += [f"{row.family} {row.name!r} of {row.distribution} cannot be used: {row.problem}" for row in unusable]
    return Diagnosis(
        software=software, contracts=contracts, plugins=plugins, machine=machine, must_fix=must_fix, advice=advice
    )
