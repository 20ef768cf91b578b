//! The policies by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{
    Fifo, Policy, PolicyError, Random, RoundRobin, ShardedLrtf, ShardedLrtfEager, ShardedLrtfLocal, Srtf,
};

/// The built-in policies, for specs and command lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Longest remaining time first, holding devices back for the model that determines the makespan:
    /// [`ShardedLrtf`]. Older files call it `sharded-lrtf-patient`.
    #[default]
    #[serde(alias = "sharded-lrtf-patient")]
    ShardedLrtf,
    /// Longest remaining time first, without holding devices back: [`ShardedLrtfEager`].
    ShardedLrtfEager,
    /// First submitted first: [`Fifo`].
    Fifo,
    /// Shortest remaining time first: [`Srtf`].
    Srtf,
    /// Uniformly at random, from a seed: [`Random`].
    Random,
    /// Cyclic: [`RoundRobin`].
    RoundRobin,
    /// Longest remaining time first, preferring cached models within a tolerance: [`ShardedLrtfLocal`].
    ShardedLrtfLocal,
}

impl PolicyKind {
    /// Every policy, the default first.
    pub const ALL: [Self; 7] = [
        Self::ShardedLrtf,
        Self::ShardedLrtfEager,
        Self::Fifo,
        Self::Srtf,
        Self::Random,
        Self::RoundRobin,
        Self::ShardedLrtfLocal,
    ];

    /// The name in specs, flags and reports, such as `sharded-lrtf`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ShardedLrtf => "sharded-lrtf",
            Self::ShardedLrtfEager => "sharded-lrtf-eager",
            Self::Fifo => "fifo",
            Self::Srtf => "srtf",
            Self::Random => "random",
            Self::RoundRobin => "round-robin",
            Self::ShardedLrtfLocal => "sharded-lrtf-local",
        }
    }

    /// Builds a policy of this kind. Only [`PolicyKind::Random`] uses the seed.
    pub fn build(self, seed: u64) -> Box<dyn Policy> {
        match self {
            Self::ShardedLrtf => Box::new(ShardedLrtf),
            Self::ShardedLrtfEager => Box::new(ShardedLrtfEager),
            Self::Fifo => Box::new(Fifo),
            Self::Srtf => Box::new(Srtf),
            Self::Random => Box::new(Random::new(seed)),
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::ShardedLrtfLocal => Box::new(ShardedLrtfLocal::default()),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| PolicyError::Unknown {
            found: text.to_owned(),
            expected: Self::ALL.map(Self::name).join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde::de::IntoDeserializer;
    use serde::de::value::{Error, StrDeserializer};

    use super::*;

    /// serde writes a unit variant into a formatter as its bare name.
    struct SerdeName(PolicyKind);

    impl fmt::Display for SerdeName {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.serialize(f)
        }
    }

    #[test]
    fn every_way_to_name_a_policy_agrees() {
        for kind in PolicyKind::ALL {
            let name = kind.name();
            assert_eq!(kind.to_string(), name);
            assert_eq!(name.parse(), Ok(kind));
            assert_eq!(kind.build(0).name(), name);
            assert_eq!(SerdeName(kind).to_string(), name);
            let read: StrDeserializer<'_, Error> = name.into_deserializer();
            assert_eq!(PolicyKind::deserialize(read), Ok(kind));
        }
    }

    /// Specs from before the renaming stay readable.
    #[test]
    fn the_former_name_of_the_default_is_read() {
        let read: StrDeserializer<'_, Error> = "sharded-lrtf-patient".into_deserializer();
        assert_eq!(PolicyKind::deserialize(read), Ok(PolicyKind::default()));
    }

    #[test]
    fn the_names_are_the_documented_ones() {
        let names = PolicyKind::ALL.map(PolicyKind::name);
        let expected =
            "sharded-lrtf, sharded-lrtf-eager, fifo, srtf, random, round-robin, sharded-lrtf-local";
        assert_eq!(names.join(", "), expected);
        assert_eq!(PolicyKind::default(), PolicyKind::ShardedLrtf);
        assert_eq!(format!("[{:>6}]", PolicyKind::Fifo), "[  fifo]");
    }

    #[test]
    fn an_unknown_name_is_told_what_there_is() {
        for found in ["lrtf", "", "FIFO", " srtf"] {
            let error = found.parse::<PolicyKind>().unwrap_err();
            assert_eq!(
                error,
                PolicyError::Unknown {
                    found: found.to_owned(),
                    expected: PolicyKind::ALL.map(PolicyKind::name).join(", "),
                }
            );
            assert!(error.to_string().contains(&format!("`{found}`")));
            assert!(error.to_string().contains("sharded-lrtf, sharded-lrtf-eager, fifo, srtf, random"));
        }
    }
}
