//! Models against Transformers (logits, loss and gradients of the same weights) and adapters against PEFT. The
//! repository contains reference models of GPT-2, text classifiers, ConvNeXt, ResNet and a vision transformer with adapters (`fixtures/parity`),
//! adapters of many kinds (`fixtures/peft`), and models in 4 bits (`fixtures/quantized`). Other models next to them are used if they exist.

mod classifiers;
mod convnext;
mod decoder;
mod encoders;
mod gpt2;
mod lora;
mod metrics;
mod nf4;
mod peft;
mod reference;
mod resnet;
mod vit;
