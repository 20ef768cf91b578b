//! Completions and manual pages.

use crate::common::{fails, says};
use std::fs;
use std::process::Command;

#[test]
fn a_shell_completes_commands_and_flags() {
    let script = tempfile::NamedTempFile::new().unwrap();
    fs::write(script.path(), says(&["completions", "bash"])).unwrap();
    let complete = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let (last, before) = (words[words.len() - 1], words[words.len() - 2]);
        let ask = format!(
            "source {}; COMP_WORDS=({line}); COMP_CWORD={}; _hydra hydra {last} {before}; echo ${{COMPREPLY[@]}}",
            script.path().display(),
            words.len() - 1,
        );
        let output = Command::new("bash").args(["--norc", "-c", &ask]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(complete("hydra com"), "compare completions");
    assert_eq!(complete("hydra train --warm"), "--warmup");
    assert_eq!(complete("hydra train --schedule co"), "constant cosine");
}

#[test]
fn every_shell_has_a_script_and_others_are_refused() {
    for (shell, begins) in [("zsh", "#compdef hydra"), ("fish", "# Print an optspec")] {
        let script = says(&["completions", shell]);
        assert!(script.starts_with(begins), "{shell}: {script:.60}");
        assert!(script.contains("checkpoint-every") && script.contains("simulate"), "{shell}");
    }
    fails(&["completions", "tcsh"], 2, &["tcsh", "bash, zsh, fish"]);
}

#[test]
fn every_command_has_a_page() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("share/man1");
    assert_eq!(says(&["man", dir.to_str().unwrap()]), "");
    let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
    let help = says(&["--help"]);
    let listed =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands: Vec<&str> = listed.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.len() > 12, "{commands:?}");
    for command in commands.iter().filter(|command| **command != "help") {
        assert!(read(&format!("hydra-{command}.1")).contains("NAME"), "{command}");
    }
    assert!(read("hydra-train.1").contains("warmup"));
    assert!(says(&["man", "-"]) == read("hydra.1"), "one page is printed as it is written");
    // Again, into the same directory.
    assert_eq!(says(&["man", dir.to_str().unwrap()]), "");
}

#[test]
fn pages_that_cannot_be_written() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fails(
        &["man", file.path().to_str().unwrap()],
        1,
        &[file.path().to_str().unwrap(), "could not be created"],
    );
    fails(&["man"], 2, &["DIR|-"]);
}
