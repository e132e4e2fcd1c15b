"""Builds models from stages."""

from rlx.flow import stages as stages
from rlx.flow.built import BuiltModel as BuiltModel
from rlx.flow.context import FlowCtx as FlowCtx
from rlx.flow.emit import Emit as Emit
from rlx.flow.flow import KvCacheSpec as KvCacheSpec
from rlx.flow.flow import ModelFlow as ModelFlow
from rlx.flow.layers import LayerStack as LayerStack
from rlx.flow.positions import rope_tables as rope_tables
from rlx.flow.recipe import ModelRecipe as ModelRecipe
from rlx.flow.side_outputs import SideOutputs as SideOutputs
from rlx.flow.stages.base import FlowStage as FlowStage
from rlx.flow.stages.custom import register_stage as register_stage
from rlx.flow.state import DecodeBindings as DecodeBindings
from rlx.flow.state import FlowState as FlowState
from rlx.flow.state import FlowValue as FlowValue
from rlx.flow.state import GdnInputSlots as GdnInputSlots
from rlx.flow.weights import MapWeights as MapWeights
from rlx.flow.weights import WeightSource as WeightSource
