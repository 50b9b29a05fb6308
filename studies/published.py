"""The numbers that the paper prints, by table; None where it has a dash. No torch here."""

#: data sets of the tables by the names that they have there
TITLES = {
    "cub": "Birds",
    "aircraft": "Aircrafts",
    "cars": "Cars",
    "dogs": "Dogs",
    "inat2017": "iNats",
    "imagenet": "ImageNet",
}
FINE_GRAINED = ("cub", "aircraft", "cars")
LARGER = ("cars", "dogs", "inat2017")

#: backbone → method → accuracy on each data set
Accuracies = dict[str, dict[str, tuple[float | None, ...]]]

METHODS = {
    "B-CNN": "bcnn",
    "Improved B-CNN": "bcnn-improved",
    "LRBP": "lrbp",
    "KP": "kp",
    "MoNet": "monet",
    "GP": "gp",
    "CBP": "cbp",
    "CBP + RUN": "run",
    "iSQRT-COV": "isqrt",
    "MPN-COV": "mpncov",
    "SVD-Padé": "mpncov",
    "MPN-COV + SEB": "mpncov+seb",
    "ViT": "gap",
}

#: Birds, Aircrafts, Cars
TABLE_3: Accuracies = {
    "vgg16": {
        "B-CNN": (84.1, 86.6, 91.3),
        "Improved B-CNN": (85.8, 88.5, 92.0),
        "LRBP": (84.2, 87.3, 90.9),
        "KP": (86.2, 86.9, 92.4),
        "MoNet": (86.4, 89.3, 91.8),
        "GP": (85.8, 89.8, 92.8),
        "CBP + RUN": (85.7, 91.0, None),
        "iSQRT-COV": (83.1, 88.6, 90.1),
        "MPN-COV": (83.4, 89.2, 90.9),
        "MPN-COV + SEB": (85.7, 90.7, 93.0),
    },
    "resnet50": {
        "CBP": (81.6, 81.6, 88.6),
        "KP": (84.7, 85.7, 91.1),
        "iSQRT-COV": (84.7, 89.6, 91.4),
        "MPN-COV": (84.3, 89.9, 91.7),
        "MPN-COV + SEB": (86.2, 91.4, 93.6),
    },
    "resnet101": {
        "iSQRT-COV": (86.0, 90.3, 91.5),
        "MPN-COV": (85.7, 89.8, 91.7),
        "MPN-COV + SEB": (87.0, 91.9, 93.9),
    },
    "resnet152": {
        "iSQRT-COV": (85.9, 90.4, 92.2),
        "MPN-COV": (86.1, 91.3, 92.5),
        "MPN-COV + SEB": (87.2, 92.7, 94.1),
    },
    "efficientnet_b5": {
        "iSQRT-COV": (87.1, 92.8, 93.3),
        "MPN-COV": (87.3, 92.4, 93.4),
        "MPN-COV + SEB": (88.2, 93.5, 94.6),
    },
}
#: the last line of Table 3
AVERAGE_GAIN = {"cub": 1.5, "aircraft": 1.5, "cars": 1.7}

#: Cars, Dogs, iNats
TABLE_4: Accuracies = {
    "vit": {
        "ViT": (93.5, 91.2, 68.0),
        "TransFG": (94.1, 92.3, 71.7),
        "AFTrans": (95.0, 91.6, 68.9),
    },
    "efficientnet_b5": {
        "iSQRT-COV": (93.3, 92.3, 71.0),
        "MPN-COV": (93.4, 92.1, 70.8),
        "MPN-COV + SEB": (94.6, 93.0, 72.3),
    },
}

TABLE_5: Accuracies = {
    "inception_v3": {
        "iSQRT-COV": (83.5, 90.0, 90.5),
        "MPN-COV": (82.7, 89.9, 90.6),
        "MPN-COV + SEB": (84.8, 90.9, 92.5),
    },
    "densenet169": {
        "iSQRT-COV": (86.4, 91.1, 92.6),
        "MPN-COV": (86.3, 90.8, 92.9),
        "MPN-COV + SEB": (87.6, 92.3, 94.0),
    },
}

#: what is passed on → accuracies, ResNet-50
TABLE_6 = {
    "Q": (84.3, 89.9, 91.7),
    "‖QSᵀ‖·Q": (85.6, 91.1, 93.0),
    "‖QSᵀ‖·Q + Q": (86.2, 91.4, 93.6),
}

#: factor → accuracies, ResNet-50
TABLE_7 = {
    "constant 100": (82.4, 88.5, 89.3),
    "ReLU(MLP(Λ^½)) + 1": (82.9, 89.1, 91.3),
    "ReLU(MLP(Q)) + 1": (80.5, 88.3, 90.7),
    "‖S‖": (83.3, 90.1, 90.6),
    "‖Q‖": (83.8, 90.3, 92.1),
    "‖QSᵀ‖": (86.2, 91.4, 93.6),
}

#: rule → which eigenvalues → correlation on Birds, Aircrafts, Cars and mean absolute error on the same
TABLE_1 = {
    "vanilla": {
        "large": ((0.06, 0.23, 0.11), (3.5e-2, 3.3e-2, 3.5e-2)),
        "small": ((0.81, 0.80, 0.81), (1.1e-2, 1.0e-2, 9.5e-3)),
    },
    "deconv": {
        "large": ((0.61, 0.70, 0.75), (8.6e-2, 6.9e-2, 6.0e-2)),
        "small": ((0.89, 0.91, 0.93), (3.4e-2, 3.1e-2, 2.4e-2)),
    },
}

#: subset of 256 eigenvalues → accuracies in inference
TABLE_2 = {
    "all": (84.3, 89.9, 91.7),
    "top:206": (65.3, 70.1, 72.4),
    "top:1+last:50": (81.3, 82.1, 83.4),
    "top:1+last:40": (79.2, 80.7, 81.8),
    "top:1+last:30": (77.1, 78.5, 79.9),
}

#: backbone → method → top-1 and top-5 on ImageNet
TABLE_9 = {
    "alexnet": {
        "iSQRT-COV": (52.06, 66.36),
        "MPN-COV": (51.23, 75.72),
        "SVD-Padé": (51.59, 76.09),
        "MPN-COV + SEB": (56.68, 79.94),
    },
    "resnet50": {
        "iSQRT-COV": (77.19, 93.40),
        "MPN-COV": (77.07, 93.25),
        "SVD-Padé": (77.33, 93.49),
        "MPN-COV + SEB": (75.79, 92.58),
    },
}

#: which eigenvalues → correlation and mean absolute error on ImageNet, plain gradients
TABLE_10 = {"large": (1.00, 2.1e-8), "small": (0.68, 2.8e-2)}

#: ResNet-50 trained on ImageNet with the head itself, then on Birds, Aircrafts, Cars
TABLE_11 = {
    "iSQRT-COV": (87.3, 89.5, 91.7),
    "MPN-COV": (87.2, 90.5, 92.8),
}

#: head → range of the condition number over the images of Figure 6, as the text gives it for all three data sets
FIGURE_6 = {"mpncov": (1e8, 1e15), "mpncov+seb": (1e7, 1e8)}
#: where the small eigenvalues of Figure 6 form a peak, and the share of the last 50 in the sum of all, mostly below this
PEAK = 2.0**-18
ENERGY_OF_LAST = 1e-3
#: truncated eigenvalues beyond which Figure 1 does not converge
NO_CONVERGENCE_BEYOND = 30
