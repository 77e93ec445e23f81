//! What is said of a server: on the command line, by the environment, by a file, in this order.

use super::name_of;
use crate::args::{ActArg, KvArg, whole};
use crate::failure::{Exit, Failure, Result};
use crate::model::LoadArgs;
use clap::ValueEnum;
use halfbyte_serve::{Limits, Settings};
use serde::Deserialize;
use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where API keys may stand, with commas or spaces between them; a command line can be seen by others.
const KEYS: &str = "HALFBYTE_API_KEYS";

/// Bytes of a file of options or keys.
const LONGEST_FILE: u64 = 1 << 20;

/// Options that a file may hold under the same names.
#[derive(Clone, Debug, Default, clap::Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Choices {
    /// Address to listen on; 0.0.0.0 or :: for all of this machine's [default: 127.0.0.1].
    #[arg(long, value_name = "IP", env = "HALFBYTE_HOST")]
    pub host: Option<IpAddr>,
    /// Port; 0 takes a free one [default: 8080].
    #[arg(long, value_name = "N", env = "HALFBYTE_PORT", value_parser = whole::<u16>(0..=65535))]
    pub port: Option<u16>,
    /// API keys, one a line; or HALFBYTE_API_KEYS in the environment, with commas between them. Without keys everybody may ask.
    #[arg(long, value_name = "FILE", env = "HALFBYTE_API_KEY_FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Answer for this name of a host too, where there are no keys (may be given several times).
    #[arg(long, value_name = "NAME", env = "HALFBYTE_ALLOWED_HOST", value_delimiter = ',')]
    pub allowed_host: Vec<String>,
    /// Certificate chain in PEM: connections are TLS.
    #[arg(long, value_name = "FILE", env = "HALFBYTE_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key in PEM.
    #[arg(long, value_name = "FILE", env = "HALFBYTE_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// Memory for weights, keys and values of all models, as 24GB [default: what is free, most of it].
    #[arg(long, value_name = "BYTES", env = "HALFBYTE_MEMORY")]
    pub memory: Option<Size>,
    /// Room for keys and values of this many tokens of all texts of a model together [default: what --memory leaves].
    #[arg(long, value_name = "N", env = "HALFBYTE_POSITIONS", value_parser = whole::<u32>(1..))]
    pub positions: Option<u32>,
    /// Texts of a model that run at a time; others wait [default: 64].
    #[arg(long, value_name = "N", env = "HALFBYTE_PARALLEL", value_parser = whole::<u32>(1..=4096))]
    pub parallel: Option<u32>,
    /// Tokens of prompts that are read in a step, beside those of running texts [default: 256, on a GPU 1024].
    #[arg(long, value_name = "N", env = "HALFBYTE_CHUNK", value_parser = whole::<u32>(1..=65536))]
    pub chunk: Option<u32>,
    /// Each text has the very bits that it has alone; slower.
    #[arg(long, env = "HALFBYTE_BATCH_INVARIANT", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub batch_invariant: Option<bool>,
    /// Bytes of a request's body, at most [default: 4194304].
    #[arg(long, value_name = "N", env = "HALFBYTE_MAX_BODY_BYTES", value_parser = whole::<usize>(1..))]
    pub max_body_bytes: Option<usize>,
    /// Tokens of a prompt, at most [default: the model's context].
    #[arg(long, value_name = "N", env = "HALFBYTE_MAX_PROMPT_TOKENS", value_parser = whole::<usize>(1..))]
    pub max_prompt_tokens: Option<usize>,
    /// New tokens of a text, at most [default: the model's context].
    #[arg(long, value_name = "N", env = "HALFBYTE_MAX_NEW_TOKENS", value_parser = whole::<usize>(1..))]
    pub max_new_tokens: Option<usize>,
    /// Texts at once, running and waiting; more are refused with 503 [default: 512].
    #[arg(long, value_name = "N", env = "HALFBYTE_MAX_REQUESTS", value_parser = whole::<usize>(1..))]
    pub max_requests: Option<usize>,
    /// Texts at once of one client, which is a key or an address; more are refused with 429 [default: 512].
    #[arg(long, value_name = "N", env = "HALFBYTE_MAX_REQUESTS_PER_CLIENT", value_parser = whole::<usize>(1..))]
    pub max_requests_per_client: Option<usize>,
    /// Connections at once; more wait [default: 2048].
    #[arg(long, value_name = "N", env = "HALFBYTE_MAX_CONNECTIONS", value_parser = whole::<usize>(1..))]
    pub max_connections: Option<usize>,
    /// Time in which a request's head or body must come, and within which a client must take some of its answer [default: 30].
    #[arg(long, value_name = "SECONDS", env = "HALFBYTE_STALL_SECONDS", value_parser = seconds)]
    pub stall_seconds: Option<f64>,
    /// Time that a request may take [default: 600].
    #[arg(long, value_name = "SECONDS", env = "HALFBYTE_REQUEST_SECONDS", value_parser = seconds)]
    pub request_seconds: Option<f64>,
    /// Time that running requests have to end once the server is told to end [default: 30].
    #[arg(long, value_name = "SECONDS", env = "HALFBYTE_DRAIN_SECONDS", value_parser = seconds)]
    pub drain_seconds: Option<f64>,
    /// Form of the lines on standard error [default: text].
    #[arg(long, value_enum, value_name = "FORM", env = "HALFBYTE_LOG")]
    pub log: Option<Log>,
    /// Models.
    #[arg(skip)]
    model: Vec<ModelChoices>,
}

/// Form of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Log {
    /// For people.
    Text,
    /// An object a line.
    Json,
}

/// A model of the file, or of the command line.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ModelChoices {
    name: Option<String>,
    /// Folder or file.
    pub path: PathBuf,
    /// Instead of the server's.
    pub positions: Option<u32>,
    /// Instead of the server's.
    pub parallel: Option<u32>,
    quantize: Option<String>,
    act: Option<String>,
    kv: Option<String>,
}

/// Bytes, as 24GB or 24GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "toml::Value")]
pub struct Size(u64);

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let text = text.trim();
        let at = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
        let (number, unit) = text.split_at(at);
        let unit = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "k" | "kb" => 1e3,
            "m" | "mb" => 1e6,
            "g" | "gb" => 1e9,
            "t" | "tb" => 1e12,
            "kib" => 1024.0,
            "mib" => 1024f64.powi(2),
            "gib" => 1024f64.powi(3),
            "tib" => 1024f64.powi(4),
            _ => return Err("expected bytes, as 24GB or 24GiB".to_owned()),
        };
        match number.parse::<f64>() {
            Ok(number) if number > 0.0 && number * unit < 1e18 => Ok(Self((number * unit) as u64)),
            _ => Err("expected bytes, as 24GB or 24GiB".to_owned()),
        }
    }
}

impl TryFrom<toml::Value> for Size {
    type Error = String;

    fn try_from(value: toml::Value) -> std::result::Result<Self, String> {
        match value {
            toml::Value::Integer(bytes) => bytes.to_string().parse(),
            toml::Value::String(text) => text.parse(),
            other => Err(format!("expected bytes, as 24GB or 24GiB, got {}", other.type_str())),
        }
    }
}

/// What times are given as.
const SECONDS: &str = "expected seconds, 0 or more, as 30 or 0.5";

fn seconds(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse().ok().filter(|&number| Duration::try_from_secs_f64(number).is_ok());
    number.ok_or_else(|| SECONDS.to_owned())
}

/// A file's text. Errors: it cannot be read, or is absurdly long.
fn read(path: &Path) -> Result<String> {
    let long = fs::metadata(path).is_ok_and(|data| data.len() > LONGEST_FILE);
    if long {
        let cause = format!("expected at most {LONGEST_FILE} bytes");
        return Err(Failure::new(Exit::Input, format!("{} is too long", path.display()), cause, "check the path"));
    }
    let text = fs::read_to_string(path).map_err(|e| Failure::io("read", path, &e))?;
    // A mark of UTF-8 before a text is none of it.
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

impl Choices {
    /// With those of a file for what is not said, and its models.
    pub fn with_file(&self, path: Option<&Path>) -> Result<(Self, Vec<ModelChoices>)> {
        let Some(path) = path else { return Ok((self.clone(), Vec::new())) };
        let text = read(path)?;
        let file: Self = toml::from_str(&text).map_err(|e| {
            // The line, and what it sets: a value may be a secret that was put at the wrong place.
            let before = |span: Range<usize>| text.bytes().take(span.start).filter(|&byte| byte == b'\n').count();
            let at = e.span().map(before).and_then(|at| Some((at, text.lines().nth(at)?)));
            let [line, option] = at.map_or([String::new(), String::new()], |(at, line)| {
                let name = line.split('=').next().unwrap_or_default().trim();
                [format!("line {} of ", at + 1), format!("{name}: ")]
            });
            Failure::new(
                Exit::Input,
                format!("{line}{} cannot be read as options", path.display()),
                format!("{option}{}", e.message()),
                "names are those of `halfbyte serve --help` without dashes before them; models are [[model]] with name and path",
            )
        })?;
        let folder = path.parent().unwrap_or(Path::new(""));
        // Paths are meant from where the file lies.
        let from_file = |path: Option<PathBuf>| path.map(|path| folder.join(path));
        let said = self.clone();
        let all = Self {
            host: said.host.or(file.host),
            port: said.port.or(file.port),
            api_key_file: said.api_key_file.or(from_file(file.api_key_file)),
            allowed_host: if said.allowed_host.is_empty() { file.allowed_host } else { said.allowed_host },
            tls_cert: said.tls_cert.or(from_file(file.tls_cert)),
            tls_key: said.tls_key.or(from_file(file.tls_key)),
            memory: said.memory.or(file.memory),
            positions: said.positions.or(file.positions),
            parallel: said.parallel.or(file.parallel),
            chunk: said.chunk.or(file.chunk),
            batch_invariant: said.batch_invariant.or(file.batch_invariant),
            max_body_bytes: said.max_body_bytes.or(file.max_body_bytes),
            max_prompt_tokens: said.max_prompt_tokens.or(file.max_prompt_tokens),
            max_new_tokens: said.max_new_tokens.or(file.max_new_tokens),
            max_requests: said.max_requests.or(file.max_requests),
            max_requests_per_client: said.max_requests_per_client.or(file.max_requests_per_client),
            max_connections: said.max_connections.or(file.max_connections),
            stall_seconds: said.stall_seconds.or(file.stall_seconds),
            request_seconds: said.request_seconds.or(file.request_seconds),
            drain_seconds: said.drain_seconds.or(file.drain_seconds),
            log: said.log.or(file.log),
            model: Vec::new(),
        };
        let models =
            file.model.into_iter().map(|model| ModelChoices { path: folder.join(&model.path), ..model }).collect();
        Ok((all, models))
    }

    /// What the server is told. Errors: keys that cannot be read, a certificate without its key, times that are none.
    pub fn settings(&self) -> Result<Settings> {
        let (settings, usual) = (Settings::default(), Limits::default());
        let seconds = |option: &str, given: Option<f64>, usual: Duration| match given {
            None => Ok(usual),
            Some(seconds) => Duration::try_from_secs_f64(seconds).map_err(|_| {
                let got = format!("{SECONDS}, got {seconds}");
                Failure::usage(format!("{option} is no time"), got, "give another number")
            }),
        };
        let stall = seconds("--stall-seconds", self.stall_seconds, usual.read)?;
        let tls = match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => Some((cert.clone(), key.clone())),
            (None, None) => None,
            _ => {
                let cause = "--tls-cert and --tls-key belong together";
                return Err(Failure::usage("half of a certificate is given", cause, "give both, or none"));
            }
        };
        Ok(Settings {
            address: SocketAddr::new(
                self.host.unwrap_or(settings.address.ip()),
                self.port.unwrap_or(settings.address.port()),
            ),
            keys: self.keys(std::env::var_os(KEYS))?,
            allowed_hosts: self.allowed_host.clone(),
            tls,
            limits: Limits {
                body_bytes: self.max_body_bytes.unwrap_or(usual.body_bytes),
                prompt_tokens: self.max_prompt_tokens.unwrap_or(usual.prompt_tokens),
                new_tokens: self.max_new_tokens.unwrap_or(usual.new_tokens),
                texts: self.max_requests.unwrap_or(usual.texts),
                texts_of_client: self.max_requests_per_client.unwrap_or(usual.texts_of_client),
                connections: self.max_connections.unwrap_or(usual.connections),
                read: stall,
                write: stall,
                request: seconds("--request-seconds", self.request_seconds, usual.request)?,
                drain: seconds("--drain-seconds", self.drain_seconds, usual.drain)?,
            },
        })
    }

    /// Keys of the environment's variable and of the file. Errors: one of them is there and holds no key, a file that cannot be read.
    fn keys(&self, variable: Option<OsString>) -> Result<Vec<String>> {
        let listed = |text: &str, between: &[char]| -> Vec<String> {
            text.split(between).map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect()
        };
        let none = |what: String| {
            let cause = "to go on without keys would let everybody in";
            Failure::new(
                Exit::Input,
                what,
                cause,
                "put a key a line into a file, or keys with commas between them into HALFBYTE_API_KEYS",
            )
        };
        let mut keys = Vec::new();
        if let Some(text) = variable {
            // A text that is no Unicode has no key that a header can hold.
            keys = text.to_str().map(|text| listed(text, &[',', ' ', '\n'])).unwrap_or_default();
            if keys.is_empty() {
                return Err(none(format!("{KEYS} is set and holds no key")));
            }
        }
        if let Some(path) = &self.api_key_file {
            let own = listed(&read(path)?, &['\n']);
            if own.is_empty() {
                return Err(none(format!("{} holds no key", path.display())));
            }
            keys.extend(own);
        }
        Ok(keys)
    }

    /// The budget of all models, if there is one.
    pub fn memory(&self) -> Option<u64> {
        self.memory.map(|Size(bytes)| bytes)
    }

    /// Whether texts have the bits that they have alone.
    pub fn batch_invariant(&self) -> bool {
        self.batch_invariant.unwrap_or(false)
    }

    /// Whether log lines are JSON.
    pub fn log_json(&self) -> bool {
        self.log == Some(Log::Json)
    }
}

/// The models of the command line, else those of the file. Error: none.
pub fn models(named: &[String], of_file: Vec<ModelChoices>) -> Result<Vec<ModelChoices>> {
    let one = |text: &String| match text.split_once('=') {
        // A path may hold such a sign.
        Some((name, path)) if !Path::new(text).exists() && !name.contains('/') => {
            ModelChoices { name: Some(name.to_owned()), path: path.into(), ..ModelChoices::default() }
        }
        _ => ModelChoices { path: text.into(), ..ModelChoices::default() },
    };
    let models: Vec<ModelChoices> = if named.is_empty() { of_file } else { named.iter().map(one).collect() };
    if models.is_empty() {
        let cause = "neither MODEL nor a [[model]] of --config is given";
        return Err(Failure::usage("there is no model to serve", cause, "name a model folder or a GGUF file"));
    }
    Ok(models)
}

impl ModelChoices {
    /// What clients call it.
    pub fn name(&self) -> Result<String> {
        self.name.clone().or_else(|| name_of(&self.path)).ok_or_else(|| {
            Failure::usage(format!("{} has no name", self.path.display()), "a model needs one", "give NAME=MODEL")
        })
    }

    /// How it is loaded: as it says, else as the command line does. Error: formats and types that do not exist.
    pub fn load(&self, all: &LoadArgs) -> Result<LoadArgs> {
        let bad = |field: &str, why: String| {
            let what = format!("{field} of the model {} is none", self.path.display());
            Failure::new(Exit::Input, what, why, "see `halfbyte serve --help`")
        };
        let mut load = all.clone();
        if let Some(format) = &self.quantize {
            load.quantize = Some(format.parse().map_err(|e: halfbyte::Error| bad("quantize", e.to_string()))?);
        }
        if let Some(act) = &self.act {
            load.act = Some(ActArg::from_str(act, false).map_err(|e| bad("act", e))?);
        }
        if let Some(kv) = &self.kv {
            load.kv = Some(KvArg::from_str(kv, false).map_err(|e| bad("kv", e))?);
        }
        Ok(load)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_comes_before_the_file_and_sizes_have_units() {
        let here = tempfile::TempDir::new().unwrap();
        let path = here.path().join("serve.toml");
        let text = "port = 9000\nmemory = \"1.5GiB\"\ndrain-seconds = 2\napi-key-file = \"keys\"\n\
                    [[model]]\nname = \"a\"\npath = \"m\"\nparallel = 3\nquantize = \"w4a8-g128\"\n";
        std::fs::write(&path, text).unwrap();
        std::fs::write(here.path().join("keys"), "\u{feff}first-key-of-this-file\n\n second-key-of-this-file \n")
            .unwrap();
        let said = Choices { port: Some(1), ..Choices::default() };
        let (all, models) = said.with_file(Some(&path)).unwrap();
        let settings = all.settings().unwrap();
        assert_eq!((settings.address.port(), all.memory()), (1, Some(3 << 29)));
        assert_eq!((settings.keys.len(), settings.limits.drain), (2, Duration::from_secs(2)));
        assert_eq!((models[0].path.clone(), models[0].name().unwrap()), (here.path().join("m"), "a".to_owned()));
        assert!(models[0].load(&LoadArgs::AS_STORED).unwrap().quantize.is_some());
        let keys = |text: &str| all.keys(Some(text.into())).map(|keys| keys.len());
        assert_eq!(keys("one-key-of-a-variable, another-key-of-it").unwrap(), 4);
        for none in ["", " ", ",", " ,\n, "] {
            assert!(keys(none).is_err(), "{none:?}");
        }
        for (bad, line, option) in [
            ("host = \"::1\"\nport = \"x\"", 2, "port: "),
            ("\nports = 1", 2, "ports: "),
            ("[[model]]\nname = \"a\"", 1, "[[model]]: "),
            ("memory = \"much\"", 1, "memory: "),
            ("port = 1\nlog = \"loud\"", 2, "log: "),
            ("port = 1\nport = 2", 2, "port: "),
            ("a b", 1, ""),
        ] {
            std::fs::write(&path, bad).unwrap();
            let Err(Failure::Message(told)) = Choices::default().with_file(Some(&path)) else { panic!("{bad}") };
            let told = format!("{told:?}");
            assert!(told.contains(&format!("line {line} of ")) && told.contains(option), "{bad}: {told}");
        }
        for (text, bytes) in [("24GB", 24_000_000_000), ("1 KiB", 1024), ("7", 7)] {
            assert_eq!(text.parse(), Ok(Size(bytes)));
        }
        assert!("".parse::<Size>().is_err() && "-1GB".parse::<Size>().is_err() && "1XB".parse::<Size>().is_err());
    }
}
