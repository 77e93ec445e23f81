//! How a server is to be: where it listens, who may use it, how much at once.

use crate::error::{Error, Result};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// All that is said of a server besides its models.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it listens; port 0 takes a free one.
    pub address: SocketAddr,
    /// Keys of clients; of none, everybody may use it.
    pub keys: Vec<String>,
    /// Names of hosts besides the loopback's that requests may be for, where there are no keys: a page from elsewhere could otherwise
    /// have a browser ask this server under a name of its own.
    pub allowed_hosts: Vec<String>,
    /// Certificate chain and private key, in PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// What requests are held to.
    pub limits: Limits,
}

/// What requests are held to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Tokens of a prompt; the model's context is another limit.
    pub prompt_tokens: usize,
    /// New tokens of a text.
    pub new_tokens: usize,
    /// Texts at once, running and waiting: a request has one for each prompt and choice.
    pub texts: usize,
    /// Texts at once of one client: an API key, or an address where there are none.
    pub texts_of_client: usize,
    /// Connections at once.
    pub connections: usize,
    /// Time in which a head or a body must have come.
    pub read: Duration,
    /// Time in which a client must take something of what is written to it.
    pub write: Duration,
    /// Time that a request may take.
    pub request: Duration,
    /// Time that requests have to end once the server is to end.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 4 << 20,
            prompt_tokens: usize::MAX,
            new_tokens: usize::MAX,
            texts: 512,
            texts_of_client: 512,
            connections: 2048,
            read: Duration::from_secs(30),
            write: Duration::from_secs(30),
            request: Duration::from_secs(600),
            drain: Duration::from_secs(30),
        }
    }
}

impl Default for Settings {
    /// The loopback, for everybody on this machine.
    fn default() -> Self {
        Self {
            address: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080),
            keys: Vec::new(),
            allowed_hosts: Vec::new(),
            tls: None,
            limits: Limits::default(),
        }
    }
}

impl Settings {
    /// Errors: limits of zero; keys that no header can hold, or that are guessed too easily.
    pub fn check(&self) -> Result<()> {
        let Limits { body_bytes, prompt_tokens, new_tokens, texts, texts_of_client, connections, .. } = self.limits;
        let Limits { read, write, request, .. } = self.limits;
        let refuse =
            |what, expected: &str, got: String| Err(Error::Settings { what, expected: expected.to_owned(), got });
        let zero = [
            ("body bytes", body_bytes == 0),
            ("prompt tokens", prompt_tokens == 0),
            ("new tokens", new_tokens == 0),
            ("requests", texts == 0),
            ("requests per client", texts_of_client == 0),
            ("connections", connections == 0),
            ("stall seconds", read.is_zero() || write.is_zero()),
            ("request seconds", request.is_zero()),
        ];
        if let Some((what, _)) = zero.into_iter().find(|(_, zero)| *zero) {
            return refuse(what, "more than zero", "0".to_owned());
        }
        let fits = |key: &String| key.len() >= SHORTEST_KEY && key.bytes().all(|byte| byte.is_ascii_graphic());
        if let Some(at) = self.keys.iter().position(|key| !fits(key)) {
            let expected = format!("at least {SHORTEST_KEY} printable characters without spaces");
            return refuse("API keys", &expected, format!("another as key {}", at + 1));
        }
        Ok(())
    }
}

/// Characters of a key, at least: fewer are guessed.
const SHORTEST_KEY: usize = 16;
