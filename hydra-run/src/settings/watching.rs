//! Monitoring a run: its dashboard and experiment trackers.

use clap::Args;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// The help heading of these flags.
const MONITORING: &str = "Monitoring";

/// The loopback address with a port that the system chooses.
const LOOPBACK: &str = "127.0.0.1:0";

/// Where a run reports its progress besides the terminal.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = MONITORING)]
pub struct WatchSettings {
    /// Serve the dashboard during the run: on a free port of this machine, or at PORT, HOST or HOST:PORT
    ///
    /// At an address other than loopback, such as 0.0.0.0:8080, everyone who can reach the port can read the dashboard.
    #[arg(long, value_name = "ADDR", num_args = 0..=1, default_missing_value = LOOPBACK, value_parser = address)]
    pub(crate) serve: Option<SocketAddr>,
    /// Write TensorBoard event files, one directory for each task [default DIR: tensorboard in the run directory]
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    pub(crate) tensorboard: Option<Option<PathBuf>>,
    /// Log settings and losses to the MLflow server at this address, such as http://127.0.0.1:5000
    #[arg(long, value_name = "URI", value_parser = uri)]
    pub(crate) mlflow: Option<String>,
}

/// Parses the address of an MLflow server. Only `http` is supported.
fn uri(text: &str) -> Result<String, String> {
    match text.strip_prefix("http://").is_some_and(|rest| !rest.is_empty()) {
        true => Ok(text.to_owned()),
        false => Err(format!("`{text}` is not an http address: expected one such as http://127.0.0.1:5000")),
    }
}

/// Parses an address to listen on.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let named = match text.strip_prefix("localhost") {
        Some(port) => format!("{}{port}", Ipv4Addr::LOCALHOST),
        None => text.to_owned(),
    };
    let on = |ip: IpAddr, port| SocketAddr::new(ip, port);
    let whole = named.parse().ok();
    let port = || Some(on(Ipv4Addr::LOCALHOST.into(), named.parse().ok()?));
    let host = || Some(on(named.trim_matches(['[', ']']).parse().ok()?, 0));
    whole.or_else(port).or_else(host).ok_or_else(|| {
        format!("`{text}` is not an address to listen on: expected a port, an IP address, or both, such as 127.0.0.1:8080")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_reached_by_http() {
        assert!(uri("http://127.0.0.1:5000").is_ok());
        assert!(
            ["", "http://", "https://a", "file:///tmp", "localhost:5000"]
                .iter()
                .all(|text| uri(text).is_err())
        );
    }

    #[test]
    fn addresses_are_ports_hosts_or_both() {
        let read = |text: &str| address(text).map(|address| address.to_string());
        let same = |text: &str, read_as: &str| assert_eq!(read(text), Ok(read_as.to_owned()), "{text}");
        same("8080", "127.0.0.1:8080");
        same("0.0.0.0", "0.0.0.0:0");
        same("localhost", "127.0.0.1:0");
        same("localhost:80", "127.0.0.1:80");
        same("[::1]:80", "[::1]:80");
        same("::1", "[::1]:0");
        for wrong in ["", "example.org:80", "localhost:x", "127.0.0.1:65536", "runs/a"] {
            assert!(address(wrong).unwrap_err().contains("an address to listen on"), "{wrong}");
        }
    }
}
