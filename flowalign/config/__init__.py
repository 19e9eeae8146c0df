"""Configs: what one may hold (a file a group of sections), and how it is read (loading)."""

from flowalign.config.learning import (
    AdvantageConfig,
    AnchorConfig,
    AwmConfig,
    EarlierConfig,
    EmaConfig,
    ForwardConfig,
    GrpoConfig,
    LabellerConfig,
    NftConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardConfig,
    SftConfig,
    StatesConfig,
    StudentConfig,
    TaskConfig,
    TeacherConfig,
)
from flowalign.config.loading import (
    LABELS,
    assignments,
    label_of,
    load,
    overlay,
    parse,
    read,
    to_yaml,
)
from flowalign.config.model import LoraConfig, ModelConfig
from flowalign.config.rollout import RolloutConfig, WindowConfig
from flowalign.config.run import (
    AlarmConfig,
    BenchmarkConfig,
    DiversityConfig,
    EvaluationConfig,
    FidelityConfig,
    GivenImages,
    ReportConfig,
    SamplingConfig,
    TrainConfig,
    TrainingAlarmConfig,
)
from flowalign.config.section import ADAPTER, ConfigError, Section
from flowalign.config.stages import (
    STAGES,
    AwmStage,
    DistillationStage,
    EvalStage,
    ForwardStage,
    GrpoStage,
    Job,
    MergeStage,
    NftStage,
    OpdStage,
    RecipeStage,
    RewardStage,
    SftStage,
    Stage,
    TrainingStage,
    stage_class,
    stage_names,
)
