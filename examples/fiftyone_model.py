"""A FiftyOne model: an adapter's answers and CLIP's embeddings in a FiftyOne data set.

    model = PerlModel("pets-adapter")                                 # a folder, or user/repo of the hub
    dataset.apply_model(model, label_field="perl", batch_size=32)     # a Classification for each image
    dataset.compute_embeddings(model, embeddings_field="clip", batch_size=32)

    python examples/fiftyone_model.py pets-adapter photos/            # both, and the app

docs/tools.md has what to install.
"""

import sys

import fiftyone
import fiftyone.core.models
import numpy as np
import torch

import perlclip


class PerlModel(fiftyone.core.models.Model, fiftyone.core.models.EmbeddingsMixin):
    """FiftyOne decodes the images; sizes, crops and batches are the classifier's affair."""

    media_type, has_embeddings, ragged_batches, transforms, preprocess = "image", True, False, None, False

    def __init__(self, adapter, **options):
        self.classifier = perlclip.Classifier.from_pretrained(adapter, **options)

    def predict(self, arg):
        return self.predict_all([arg])[0]

    def predict_all(self, args):
        found = self.classifier.predict(list(args))
        return [fiftyone.Classification(label=one.label, confidence=one.probability) for one in found]

    def embed(self, arg):
        return self.embed_all([arg])[0]

    def embed_all(self, args):
        method, backbone = self.classifier.method, self.classifier.method.backbone
        views = [backbone.preprocess.test_view(perlclip.data.read_image(image)) for image in args]
        with torch.no_grad():
            images = method.frozen(torch.stack(views).to(backbone.device))
            return np.asarray(backbone.encode_image(images).float().cpu())


def main():
    adapter, folder = sys.argv[1:]
    dataset, model = fiftyone.Dataset.from_images_dir(folder), PerlModel(adapter)
    dataset.apply_model(model, label_field="perl", batch_size=32)
    dataset.compute_embeddings(model, embeddings_field="clip", batch_size=32)
    print(dataset.count_values("perl.label"))
    fiftyone.launch_app(dataset).wait()


if __name__ == "__main__":
    main()
