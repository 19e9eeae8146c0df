"""Configs: what one may hold (a file a stage, or a group of sections), and how it is read."""

from flowalign.config.learning import (
    AdvantageConfig,
    EmaConfig,
    LabellerConfig,
    OptimizerConfig,
    RewardConfig,
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
    EvaluationConfig,
    SamplingConfig,
    TrainConfig,
    TrainingAlarmConfig,
)
from flowalign.config.section import ADAPTER, ConfigError, Section
from flowalign.config.stages import STAGES, RecipeStage, stage_class, stage_names
from flowalign.config.stages.base import Job, Judged, Stage
from flowalign.config.stages.evaluation import (
    EvalStage,
    FidelityConfig,
    GivenImages,
    ReportConfig,
)
from flowalign.config.stages.merge import MergeStage
from flowalign.config.stages.rewards import (
    AwmConfig,
    AwmStage,
    DpoStage,
    ForwardConfig,
    ForwardStage,
    GradientConfig,
    GradientStage,
    GrpoConfig,
    GrpoStage,
    NftConfig,
    NftStage,
    PolicyConfig,
    PolicyLearning,
    PolicyStage,
    RewardStage,
)
from flowalign.config.stages.students import (
    AnchorConfig,
    DistillationStage,
    OpdStage,
    SftConfig,
    SftStage,
    StatesConfig,
    StudentConfig,
)
from flowalign.config.stages.training import TrainingStage
