//! Authentication, and protection against CSRF and DNS rebinding.
//!
//! Another site can make a browser send requests to this server, and can make a domain name that it controls resolve to this
//! machine (DNS rebinding). A request is therefore answered only if its `Host` is an IP address or `localhost`, and its
//! `Origin`, if present, is this server. Requests that change a run also need the token of the printed address. The token is in
//! no cookie, so browsers never send it on their own.

use axum::http::{HeaderMap, header};
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;

/// The header with the token.
pub(super) const TOKEN: &str = "x-hydra-token";

/// The secret in the printed address. It authorizes changes to runs.
pub(super) struct Token(String);

impl Token {
    /// Returns a new random token.
    pub(super) fn new() -> io::Result<Self> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// Returns true if the headers contain the token. Compares in constant time.
    pub(super) fn is_in(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(TOKEN).map_or(&b""[..], |given| given.as_bytes());
        let own = self.0.as_bytes();
        let differ = own.iter().zip(given).fold(0, |differ, (a, b)| differ | (a ^ b));
        own.len() == given.len() && std::hint::black_box(differ) == 0
    }
}

/// Returns the reason why a request is refused, or `None`.
pub(super) fn refusal(headers: &HeaderMap) -> Option<&'static str> {
    let Some(host) = one(headers, header::HOST.as_str()) else {
        return Some("a request must have exactly one Host header");
    };
    if !is_own(host) {
        return Some("this server is reachable by an IP address or as localhost, not by another name");
    }
    if headers.contains_key(header::ORIGIN) {
        let origin = one(headers, header::ORIGIN.as_str());
        if origin.and_then(|origin| origin.strip_prefix("http://")) != Some(host) {
            return Some("this server does not answer requests of other sites");
        }
    }
    None
}

/// Returns the value of a header that occurs exactly once.
fn one<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(first)
}

/// Returns true if a host is an IP address or `localhost`, with or without a port: these cannot be rebound.
fn is_own(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, Some(port)),
        _ => (host, None),
    };
    let name = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(inside) => inside,
        None if name.contains(':') => return false,
        None => name,
    };
    let is_port = port.is_none_or(|port| port.parse::<u16>().is_ok());
    is_port && (name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};

    fn headers(of: &[(&'static str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        };
        of.iter().map(pair).collect()
    }

    #[test]
    fn names_that_others_control_are_refused() {
        for host in ["127.0.0.1:80", "localhost:9000", "LOCALHOST", "[::1]:80", "192.168.0.7", "10.0.0.1:1"] {
            assert_eq!(refusal(&headers(&[("host", host)])), None, "{host}");
        }
        for host in
            ["evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "::1", "", "localhost:x"]
        {
            assert!(refusal(&headers(&[("host", host)])).is_some(), "{host}");
        }
        assert!(refusal(&headers(&[])).is_some());
        let mut twice = headers(&[("host", "localhost")]);
        twice.append("host", HeaderValue::from_static("127.0.0.1"));
        assert!(refusal(&twice).is_some());
    }

    #[test]
    fn pages_of_others_are_refused() {
        let from = |origin| refusal(&headers(&[("host", "127.0.0.1:80"), ("origin", origin)]));
        assert_eq!(from("http://127.0.0.1:80"), None);
        for origin in ["http://evil.example", "null", "http://127.0.0.1:81", "https://127.0.0.1:80", ""] {
            assert!(from(origin).is_some(), "{origin}");
        }
    }

    #[test]
    fn the_token_is_long_and_only_the_whole_of_it_counts() {
        let (token, other) = (Token::new().unwrap(), Token::new().unwrap());
        assert!(token.text().len() == 32 && token.text() != other.text());
        let is_in = |text: &str| token.is_in(&headers(&[(TOKEN, text)]));
        assert!(is_in(token.text()));
        assert!(!is_in(other.text()) && !is_in(&token.text()[..31]) && !is_in(""));
        assert!(!is_in(&format!("{}0", token.text())) && !token.is_in(&headers(&[])));
    }
}
