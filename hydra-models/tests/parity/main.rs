//! Models against Hugging Face transformers: logits, loss and gradients of the same weights; and adapters against PEFT.
//! One reference model of GPT-2 is in the repository (`fixtures/parity`); others, beside it, are taken where they are
//! there.

mod decoder;
mod gpt2;
mod lora;
mod reference;
mod vit;
