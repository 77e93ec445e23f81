//! A request to a server: the first byte says for what, then its body, or head and body.
#![no_main]

use halfbyte::cpu::Cpu;
use halfbyte_llm::chat::{ChatTemplate, SpecialTokens};
use halfbyte_llm::schedule::Options;
use halfbyte_llm::{LoadOptions, Model, Tokenizer};
use halfbyte_serve::{Limits, Served, Server, Settings};
use libfuzzer_sys::fuzz_target;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

const TEMPLATE: &str = "{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}\
    {% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}";

/// A server of the model that ships, for as long as the process lives. It writes two tokens a text.
fn server() -> SocketAddr {
    static SERVER: OnceLock<SocketAddr> = OnceLock::new();
    *SERVER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stdlib-11m");
        let model = Model::load(&folder, &LoadOptions::default()).expect("the model that ships");
        let tokenizer = Tokenizer::from_folder(&folder).expect("its tokenizer");
        let template = ChatTemplate::parse(TEMPLATE.to_owned(), SpecialTokens::default(), &folder).expect("a template");
        let cpu = Arc::new(Cpu::new(1).expect("a thread"));
        let served = Served::start("m", model, tokenizer, Some(template), cpu, Options::default()).expect("an engine");
        let limits = Limits { new_tokens: 2, read: Duration::from_millis(200), ..Limits::default() };
        let settings = Settings { address: ([127, 0, 0, 1], 0).into(), limits, ..Settings::default() };
        let (address, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let server = Server::bind(settings, vec![served]).await.expect("a port");
                address.send(server.address().expect("its address")).expect("who waits for it");
                server.run(std::future::pending()).await.expect("a server that goes on");
            });
        });
        told.recv().expect("an address")
    })
}

fuzz_target!(|input: &[u8]| {
    let Some((kind, rest)) = input.split_first() else { return };
    let path = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"][*kind as usize % 3];
    let request = match kind / 3 % 4 {
        // The whole request.
        0 => rest.to_vec(),
        _ => {
            let length = rest.len();
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
            );
            [head.as_bytes(), rest].concat()
        }
    };
    let mut stream = TcpStream::connect(server()).expect("a server that listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time");
    let _ = stream.write_all(&request);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => panic!("no answer"),
        _ => assert!(!answer.starts_with(b"HTTP/1.1 500"), "{}", String::from_utf8_lossy(&answer)),
    }
});
