"""Robots: simulators behind one small interface, played in processes of their own."""

from rill.envs.robots.base import SIMULATORS, Simulator, SimulatorConfig, Step, open_simulator

__all__ = ["SIMULATORS", "Simulator", "SimulatorConfig", "Step", "open_simulator"]
