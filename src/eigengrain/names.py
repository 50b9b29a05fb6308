"""The names, and the largest side of an image, that options accept.

No torch here: the help and the shell completion are made from these tuples.

Other modules import their tuple from here, so that each list exists once. A test compares ``HEADS`` with the registry.
"""

#: names for ``create_head``
HEADS = (
    *("aftrans", "bcnn", "bcnn-improved", "cbp", "dropcov", "gap", "gmp", "gp", "hcov", "hcov+seb", "isice", "isqrt"),
    *("isqrt+seb", "kp", "logchol", "logchol+seb", "logcov", "logcov+seb", "lrbp", "monet", "mpa", "mpa+seb", "mpncov"),
    *("mpncov+seb", "mtp", "mtp+seb", "precision", "run", "svpn", "token", "transfg"),
)
#: backbones of the paper, of its comparisons and of the demo; ``list_backbones`` has all of timm and torchvision
BACKBONES = (
    *("tv:alexnet", "vgg16", "vgg16_bn", "resnet18", "resnet50", "resnet101", "resnet152", "densenet169", "inception_v3"),
    *("efficientnet_b5", "tf_efficientnet_b5", "tf_efficientnet_lite0", "convnext_tiny", "vit_small_patch16_224"),
    *("vit_base_patch16_224", "swin_tiny_patch4_window7_224", "plumage_net"),
)
#: convolution of a ResNet block that has the stride
STRIDES = ("3x3", "1x1")

#: solvers of ``sqrt_covariance``
SOLVERS = ("auto", "eigh", "gram", "svd", "products")
#: working precisions of ``sqrt_covariance``
DTYPES = ("auto", "float64", "float32")
#: derivatives of a spectrum of which some eigenvalues are cut
CUTS = ("exact", "projector")

SPLITS = ("train", "val", "test")
#: kinds of preprocessing, see ``Transforms``
TRANSFORMS = ("paper", "scripts", "imagenet", "timm", "none")
INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "lanczos")

AMP = ("none", "bf16", "fp16")
CACHES = ("none", "device")
#: parts of a model that a training can leave as they are
FREEZES = ("backbone",)
#: against classes of different sizes: classes drawn equally often, or weights of the loss
BALANCES = ("none", "sampler", "weights")
LOGS = ("none", "tensorboard")
#: which weights of a training are kept
SELECTIONS = ("last", "best-val", "best-test")
#: ``drops`` divides the learning rate at given epochs; the others are timm's
SCHEDULES = ("drops", "constant", "cosine", "tanh", "step", "poly", "plateau")
DEVICES = ("auto", "cpu", "cuda", "mps")

#: backward rules at the ReLUs
RULES = ("vanilla", "deconv", "guided")
#: what a map explains, besides a class by name or number
TARGETS = ("predicted", "label", "norm")
MEASURES = (
    *("corr", "mae", "norm_ratio", "object_energy", "object_pointing", "object_over_area"),
    *("parts_energy", "parts_pointing", "parts_over_area", "gap", "deletion", "insertion"),
)
#: colour scales of a panel: one per row or one per map
SCALES = ("row", "each")
#: eigenvalues that an image is perturbed toward
DIRECTIONS = ("large", "small")
#: largest side of an image in pixels, also where a folder of a stranger states it
MAX_SIDE = 4096
