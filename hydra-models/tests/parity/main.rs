//! Models against Hugging Face transformers: logits, loss and gradients of the same weights; and adapters against PEFT.
//! Reference models of GPT-2, of ConvNeXt and of a vision transformer with adapters are in the repository
//! (`fixtures/parity`), and adapters of many kinds (`fixtures/peft`); other models, beside it, are taken where they are there.

mod convnext;
mod decoder;
mod gpt2;
mod lora;
mod peft;
mod reference;
mod vit;
