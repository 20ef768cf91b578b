//! The build and the processor, on which the bits of results depend in addition to the run.

use hydra_models::ops::bf16_products;
use serde_json::{Value, json};
use std::fs;

/// Returns the program's version, its target system, the processor's name, and what computes products of `bf16` on it,
/// on which no bit depends.
pub(crate) fn kind() -> Value {
    let system = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
    json!({
        "hydra": env!("CARGO_PKG_VERSION"), "system": system, "processor": processor(),
        "bf16_products": bf16_products(),
    })
}

/// Returns the processor's name, if the system reports it.
fn processor() -> Option<String> {
    named(&fs::read_to_string("/proc/cpuinfo").ok()?)
}

fn named(text: &str) -> Option<String> {
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'))?;
        Some(line.trim().to_owned())
    };
    // Arm processors report numbers.
    value("model name").or_else(|| Some(format!("{} {}", value("CPU implementer")?, value("CPU part")?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_have_names_or_numbers() {
        let named = |text| super::named(text);
        assert_eq!(named("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n").as_deref(), Some("A CPU @ 2 GHz"));
        assert_eq!(named("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n").as_deref(), Some("0x41 0xd0c"));
        assert_eq!(named(""), None);
        assert_eq!(kind()["hydra"], env!("CARGO_PKG_VERSION"));
        assert!(["AVX-512 BF16", "emulated"].contains(&kind()["bf16_products"].as_str().unwrap()));
    }
}
