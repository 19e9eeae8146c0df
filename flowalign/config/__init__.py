"""Configs: what one may hold (schema), and how it is read (loading)."""

from flowalign.config.loading import assignments, load, overlay, parse, read, to_yaml
from flowalign.config.schema import (
    ADAPTER,
    SD3_ATTENTION,
    STAGES,
    BenchmarkConfig,
    ConfigError,
    DistillationStage,
    EvalStage,
    GrpoConfig,
    GrpoStage,
    Job,
    MergeStage,
    ModelConfig,
    OpdStage,
    RecipeStage,
    SamplingConfig,
    Section,
    SftStage,
    Stage,
    StatesConfig,
    StudentConfig,
    TaskConfig,
    TeacherConfig,
    TrainConfig,
    TrainingStage,
)
