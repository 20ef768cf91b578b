//! A minimal HTTP client that can send any header.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// The response of a server.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("{self:?}"))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let mut pairs = self.head.lines().filter_map(|line| line.split_once(':'));
        pairs.find_map(|(key, value)| key.eq_ignore_ascii_case(name).then(|| value.trim()))
    }
}

/// Sends a request. `Host` is the address unless `headers` contains another one.
pub fn request(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let mut stream = send(address, method, path, headers, body);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && stream.read_line(&mut head).unwrap() > 0 {}
    let mut answer = Answer { status: head.get(9..12).unwrap().parse().unwrap(), head, body: String::new() };
    let length = answer.header("content-length").map(|length| length.parse().unwrap());
    stream.take(length.unwrap_or(u64::MAX)).read_to_string(&mut answer.body).unwrap();
    answer
}

fn send(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> BufReader<TcpStream> {
    let host = headers.iter().find(|(name, _)| *name == "host").map_or(address, |(_, host)| host);
    let others = headers.iter().filter(|(name, _)| *name != "host");
    let others: String = others.map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\n{others}Content-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    // Fails if the server refuses a long body before its end.
    let _ = stream.write_all(body.as_bytes());
    BufReader::new(stream)
}

/// An event stream.
pub struct Events(BufReader<TcpStream>);

impl Events {
    pub fn open(address: &str, path: &str) -> Self {
        Self(send(address, "GET", path, &[], ""))
    }

    /// Returns the data of the next event.
    pub fn next(&mut self) -> Value {
        loop {
            let mut line = String::new();
            assert!(self.0.read_line(&mut line).unwrap() > 0, "the stream has ended");
            if let Some(data) = line.strip_prefix("data: ") {
                return serde_json::from_str(data).unwrap();
            }
        }
    }
}
