"""Well-known tools under the names that different clients give them: files, shell, weather, search, mail, calendar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .dialog import Json, schema
from .schemas import snippet
from .words import CURRENCIES, LANGUAGES, MONTHS, PATH_PARTS, THINGS, WEATHER, Source

S, INT = {"type": "string"}, {"type": "integer"}
ENDINGS = (".py", ".md", ".json", ".txt", ".c", ".h", ".rs", ".ts")
STRINGS: Json = {"type": "array", "items": {"type": "string"}}
TODOS: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"content": {"type": "string"}, "status": {"type": "string"}},
        "required": ["content", "status"],
    },
}


@dataclass(frozen=True)
class Event:
    """One use of a tool: the request, canonical arguments, the result and the answer that uses it."""

    request: str
    args: tuple[object, ...]
    result: str
    answer: str
    must: tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """A tool known by several spellings, "name parameter ..."; types in the order of the canonical arguments."""

    key: str
    description: str
    spellings: tuple[str, ...]
    types: tuple[Json, ...]
    make: Callable[[Source], Event]

    def schema(self, spelling: int, described: bool = False, more: str = "") -> Json:
        """The tool in one spelling; `more` is added to its description."""
        name, *keys = self.spellings[spelling % len(self.spellings)].split()
        properties = {
            k: {**t, "description": f"The {k.replace('_', ' ')}."} if described else t
            for k, t in zip(keys, self.types, strict=True)
        }
        return schema(name, f"{self.description} {more}".strip(), properties)

    def call(self, spelling: int, args: tuple[object, ...]) -> tuple[str, Json]:
        name, *keys = self.spellings[spelling % len(self.spellings)].split()
        return name, dict(zip(keys, args, strict=True))


def weather(rng: Source) -> Event:
    city, sky, degrees = rng.city(), rng.choice(WEATHER), rng.randint(-9, 39)
    result = rng.choice(
        (
            f'{{"city": "{city}", "sky": "{sky}", "degrees": {degrees}}}',
            f"{sky}, {degrees} degrees",
            f"{city}: {sky}, {degrees} C",
        )
    )
    ask = rng.choice(
        (
            "What is the weather in {}?",
            "weather in {}",
            "How is the weather in {} today?",
            "Is it nice in {}?",
            "Tell me the weather for {}.",
            "What's it like outside in {}?",
            "Do I need a coat in {}?",
        )
    )
    return Event(
        ask.format(city),
        (city,),
        result,
        f"The weather in {city} is {sky} with {degrees} degrees.",
        (sky, str(degrees)),
    )


def search(rng: Source) -> Event:
    query = rng.phrase(1, 3)
    title = rng.phrase(2, 3)
    ask = rng.choice(
        (
            "Search the web for {}.",
            "Search for {}",
            "Look up {} on the web.",
            "Find something about {}.",
            "google {}",
            'Do a web search for "{}".',
        )
    )
    return Event(
        ask.format(query), (query,), f"1. {title}\n2. {rng.phrase(2, 3)}", f"The first result is: {title}.", (title,)
    )


def read_file(rng: Source) -> Event:
    path = rng.path()
    if rng.chance(0.3):
        return read_setting(rng, path)
    key, word = rng.choice(PATH_PARTS), rng.word()
    text = rng.choice((f"{key} = {word}", f"{key}: {word}", snippet(rng), rng.phrase(2, 4)))
    ask = rng.choice(
        (
            "Read {}.",
            "Show me {}",
            "What is in {}?",
            "Open the file {}.",
            "cat {}",
            "Please read the file {}.",
            "What does {} say?",
            "Print the content of {}",
            "Look at {}",
        )
    )
    return Event(ask.format(shown(rng, path)), (path,), text, f"The file {path} says:\n{text}", (text,))


def read_setting(rng: Source, path: str) -> Event:
    """A question about one line of a longer file."""
    keys = rng.sample(sorted(set(PATH_PARTS)), rng.randint(3, 12))
    form = rng.choice(("{} = {}", "{}: {}", "{}={}", '"{}": "{}",'))
    values = [rng.word() if rng.chance(0.6) else str(rng.integer(1, 9999)) for _ in keys]
    n = rng.randrange(len(keys))
    ask = rng.choice(
        (
            "What is {k} in {p}?",
            "Which value has {k} in {p}?",
            "Look into {p} and tell me the value of {k}.",
            "Read {p}. What is {k} set to?",
        )
    )
    text = "\n".join(form.format(k, v) for k, v in zip(keys, values, strict=True))
    return Event(
        ask.format(k=keys[n], p=shown(rng, path)), (path,), text, f"In {path}, {keys[n]} is {values[n]}.", (values[n],)
    )


def shell_array(rng: Source) -> Event:
    event = shell(rng)
    return Event(event.request, (["bash", "-lc", event.args[0]],), event.result, event.answer, event.must)


def todo_write(rng: Source) -> Event:
    items = [rng.phrase(1, 3) for _ in range(rng.randint(1, 3))]
    todos = [{"content": item, "status": "pending"} for item in items]
    ask = rng.choice(("Make a todo list: {}", "Plan these tasks: {}", "Write down these todos: {}"))
    return Event(
        ask.format("; ".join(items)),
        (todos,),
        rng.choice(("ok", "Todos saved.")),
        f"I wrote down: {'; '.join(items)}.",
        (items[0],),
    )


def write_file(rng: Source) -> Event:
    path, text = rng.path(), snippet(rng) if rng.chance(0.7) else rng.phrase(2, 4)
    block = f"\n```\n{text}\n```" if "\n" in text or rng.chance(0.3) else f" {text}" if '"' in text else f' "{text}"'
    ask = rng.choice(
        (
            "Write this to {p}:{t}",
            "Create the file {p} with this content:{t}",
            "Save this in {p}:{t}",
            "Put this into {p}:{t}",
            "Make a file {p} that contains:{t}",
        )
    )
    return Event(
        ask.format(p=path, t=block),
        (path, text),
        rng.choice(("ok", f"Wrote {len(text)} bytes.", "File written.")),
        f"I wrote {path}.",
        (path,),
    )


def list_dir(rng: Source) -> Event:
    path = rng.path(folder=True)
    names = [
        f"{rng.pick(PATH_PARTS, plain=True)}.{rng.choice(('py', 'txt', 'md', 'json'))}"
        for _ in range(rng.randint(2, 4))
    ]
    ask = rng.choice(
        (
            "List the files in {}.",
            "What files are in {}?",
            "ls {}",
            "Show the folder {}",
            "What is in the directory {}?",
            "List {}",
        )
    )
    return Event(
        ask.format(shown(rng, path)),
        (path,),
        "\n".join(names),
        f"The folder {path} has: {', '.join(names)}.",
        tuple(names),
    )


def shown(rng: Source, path: str) -> str:
    return rng.choice(("{}", "{}", "`{}`", '"{}"')).format(path)


def shell(rng: Source) -> Event:
    path, word, number = rng.path(), rng.word(), rng.integer(1, 99)
    command, result = rng.choice(
        (
            (f"ls -la {path}", f"-rw-r--r-- 1 {number} {path}"),
            (f"wc -l {path}", f"{number} {path}"),
            (f'grep -n "{word}" {path}', f"{number}:{word}"),
            ("git status", f"On branch {word}"),
            (f"python {path}", f"{word} {number}"),
            (f"cat {path} | head -n {number}", word),
            ("pytest -q", f"{number} passed"),
            (f'echo "{word}" && pwd', f"{word}\n/home/{word}"),
            (f"mkdir -p {path}", ""),
            (f"git log -n {number}", f"commit {word}"),
            (f'find . -name "*.{word}"', f"./{word}.{word}"),
            (f"rm -f {path} 2>&1", ""),
            ("date", f"{rng.date()}"),
            (f"make {word}", f"{word} done"),
            (f'git commit -m "{rng.phrase(2, 3)}"', f"[main {number}] {word}"),
            (f"sed -n '1,{number}p' {path}", word),
            (f"test {number} -lt 50 && echo '<{word}>'", f"<{word}>"),
        )
    )
    ask = rng.choice(
        (
            "Run `{}`",
            "Run the command {}",
            "Execute: {}",
            "Please run {}",
            "run {} in the shell",
            "Can you run `{}`?",
            "$ {}",
        )
    )
    answer = f"The output is:\n{result}" if result else "The command ran without output."
    return Event(ask.format(command), (command,), result, answer, (result,) if result else ("without output",))


def grep(rng: Source) -> Event:
    pattern, folder, path, line = rng.word(), rng.path(folder=True), rng.path(), rng.randint(1, 400)
    ask = rng.choice(("Search for {} in {}.", "grep {} in {}", 'Find "{}" in the folder {}', "Where is {} used in {}?"))
    return Event(
        ask.format(pattern, folder),
        (pattern, folder),
        f"{path}:{line}: {pattern}",
        f"{pattern} is in {path} on line {line}.",
        (path, str(line)),
    )


def find_files(rng: Source) -> Event:
    pattern = rng.of_split(
        "pattern",
        lambda: (
            rng.choice(("**/", "", "src/")) + "*" + rng.choice(("", "_" + rng.choice(PATH_PARTS))) + rng.choice(ENDINGS)
        ),
    )
    found = [rng.path() for _ in range(rng.randint(1, 2))]
    ask = rng.choice(("Find files that match {}.", "Find all {} files", "Which files match {}?", "glob {}"))
    return Event(ask.format(pattern), (pattern,), "\n".join(found), f"I found {', '.join(found)}.", tuple(found))


def edit_file(rng: Source) -> Event:
    path, old, new = rng.path(), rng.phrase(1, 2), rng.phrase(1, 2)
    ask = rng.choice(
        (
            'In {p}, replace "{o}" with "{n}".',
            "Change {o} to {n} in {p}.",
            "Edit {p}: replace `{o}` by `{n}`",
            'Please change "{o}" into "{n}" in the file {p}.',
        )
    )
    return Event(
        ask.format(p=path, o=old, n=new),
        (path, old, new),
        rng.choice(("ok", "1 replacement made.", "Edited.")),
        f"I changed {path}.",
        (path,),
    )


def send_mail(rng: Source) -> Event:
    to, subject, body = rng.email(), rng.phrase(1, 3), rng.phrase(2, 4)
    ask = rng.choice(
        (
            'Send a mail to {a} with subject "{s}" and text "{b}".',
            "Write an email to {a}, subject {s}: {b}",
            "Email {a}. Subject: {s}. Body: {b}",
        )
    )
    return Event(
        ask.format(a=to, s=subject, b=body),
        (to, subject, body),
        rng.choice(("sent", '{"status": "sent"}', "ok")),
        f"I sent the mail to {to}.",
        (to,),
    )


def calendar(rng: Source) -> Event:
    title, date, time = rng.phrase(1, 3), rng.date(), rng.clock()
    ask = rng.choice(
        (
            "Add {t} to my calendar on {d} at {c}.",
            'Create an event "{t}" on {d} at {c}.',
            "Put {t} on {d}, {c} in the calendar",
            "I have {t} on {d} at {c}, please note it.",
        )
    )
    number = rng.integer(10, 9999)
    return Event(
        ask.format(t=title, d=date, c=time),
        (title, date, time),
        f'{{"event_id": {number}}}',
        f"I added {title} on {date} at {time}. The event has id {number}.",
        (str(number),),
    )


def translate(rng: Source) -> Event:
    text, language, made = rng.phrase(1, 3), rng.choice(LANGUAGES), f"{rng.pseudo()} {rng.pseudo()}"
    ask = rng.choice(('Translate "{t}" into {g}.', "How do you say {t} in {g}?", "What is {t} in {g}?", "{g} for {t}?"))
    return Event(ask.format(t=text, g=language), (text, language), made, f'In {language} it is "{made}".', (made,))


def currency(rng: Source) -> Event:
    amount, (a, b), out = rng.integer(1, 999), rng.sample(CURRENCIES, 2), rng.decimal()
    ask = rng.choice(("Convert {n} {a} to {b}.", "How much is {n} {a} in {b}?", "{n} {a} in {b}"))
    return Event(ask.format(n=amount, a=a, b=b), (amount, a, b), f"{out}", f"{amount} {a} are {out} {b}.", (str(out),))


def clock(rng: Source) -> Event:
    city, time = rng.city(), rng.clock()
    ask = rng.choice(("What time is it in {}?", "time in {}", "Tell me the time in {}.", "How late is it in {}?"))
    return Event(
        ask.format(city), (city,), rng.choice((time, f'{{"time": "{time}"}}')), f"It is {time} in {city}.", (time,)
    )


def stock(rng: Source) -> Event:
    symbol, price = (
        rng.of_split("symbol", lambda: "".join(rng.choice("ABCDEFGHKLMNOPRSTUVX") for _ in range(rng.randint(2, 4)))),
        rng.decimal(),
    )
    ask = rng.choice(
        ("What is the price of {}?", "How is the {} stock?", "stock price of {}", "Get me the price of {} shares.")
    )
    return Event(
        ask.format(symbol),
        (symbol,),
        rng.choice((str(price), f'{{"price": {price}}}')),
        f"The price of {symbol} is {price}.",
        (str(price),),
    )


def timer(rng: Source) -> Event:
    minutes = rng.integer(1, 120)
    ask = rng.choice(
        ("Set a timer for {} minutes.", "timer {} minutes", "Wake me in {} minutes.", "Remind me in {} minutes")
    )
    return Event(ask.format(minutes), (minutes,), "ok", f"The timer is set to {minutes} minutes.", (str(minutes),))


def todo(rng: Source) -> Event:
    text = rng.phrase(2, 4)
    ask = rng.choice(("Add {} to my todo list.", 'Put "{}" on my list.', "New todo: {}", "Remember to buy a {}"))
    count = rng.randint(1, 30)
    return Event(
        ask.format(text), (text,), f"{count} items", f"I added {text}. Your list has {count} items.", (str(count),)
    )


def contact(rng: Source) -> Event:
    name, mail, phone = rng.name(), rng.email(), rng.of_split("phone", lambda: f"555-{rng.randint(1000, 9999)}")
    ask, which = rng.choice(
        (
            ("What is the phone number of {}?", phone),
            ("Find the email address of {}.", mail),
            ("How can I call {}?", phone),
            ("mail address of {}?", mail),
        )
    )
    answer = f"The phone number of {name} is {phone}." if which == phone else f"The email address of {name} is {mail}."
    return Event(
        ask.format(name), (name,), f'{{"name": "{name}", "email": "{mail}", "phone": "{phone}"}}', answer, (which,)
    )


def fetch(rng: Source) -> Event:
    url, title = rng.url(), rng.phrase(2, 4)
    ask = rng.choice(("Open {}.", "What does {} say?", "Fetch {}", "Read the page {}", "Get {} and tell me the title."))
    return Event(
        ask.format(url),
        (url,),
        rng.choice((f"<title>{title}</title>", title, f"# {title}")),
        f"The page says: {title}.",
        (title,),
    )


def news(rng: Source) -> Event:
    topic, title, month = rng.pick(THINGS), rng.phrase(2, 4), rng.choice(MONTHS)
    ask = rng.choice(("What is the news about {}?", "Any news on {}?", "Show me the news about {}."))
    return Event(
        ask.format(topic),
        (topic,),
        f"{month} {rng.randint(1, 28)}: {title}",
        f"The news of {month} is: {title}.",
        (title, month),
    )


KNOWN = (
    Known(
        "weather",
        "Get the weather for a city.",
        ("get_weather city", "weather location", "current_weather place"),
        (S,),
        weather,
    ),
    Known(
        "search",
        "Search the web.",
        ("search_web query", "web_search query", "WebSearch query", "search q"),
        (S,),
        search,
    ),
    Known(
        "read",
        "Read a file.",
        ("read_file path", "Read file_path", "read filePath", "open_file filename", "view path"),
        (S,),
        read_file,
    ),
    Known(
        "write",
        "Write a file.",
        ("write_file path content", "Write file_path content", "write filePath content", "create_file filename text"),
        (S, S),
        write_file,
    ),
    Known("list", "List a folder.", ("list_dir path", "LS path", "list path", "list_files directory"), (S,), list_dir),
    Known(
        "shell",
        "Run a shell command.",
        ("bash command", "Bash command", "shell cmd", "run_command command", "exec command"),
        (S,),
        shell,
    ),
    Known(
        "shell_array",
        "Run a command and return its output.",
        ("shell command", "local_shell command", "exec_command cmd"),
        (STRINGS,),
        shell_array,
    ),
    Known(
        "todos",
        "Write the list of tasks.",
        ("TodoWrite todos", "todowrite todos", "update_plan plan"),
        (TODOS,),
        todo_write,
    ),
    Known(
        "grep",
        "Search for text in files.",
        ("grep pattern path", "Grep pattern path", "search_files regex folder"),
        (S, S),
        grep,
    ),
    Known("glob", "Find files by pattern.", ("glob pattern", "Glob pattern", "find_files pattern"), (S,), find_files),
    Known(
        "edit",
        "Replace text in a file.",
        (
            "edit_file path old new",
            "Edit file_path old_string new_string",
            "edit filePath oldString newString",
            "str_replace path old_str new_str",
        ),
        (S, S, S),
        edit_file,
    ),
    Known(
        "mail",
        "Send an email.",
        ("send_email to subject body", "send_mail recipient subject text"),
        (S, S, S),
        send_mail,
    ),
    Known(
        "calendar",
        "Add an event to the calendar.",
        ("create_event title date time", "add_event name day hour"),
        (S, S, S),
        calendar,
    ),
    Known(
        "translate", "Translate a text.", ("translate text language", "translate_text text target"), (S, S), translate
    ),
    Known(
        "currency",
        "Convert money between currencies.",
        ("convert_currency amount from to", "exchange value source target"),
        (INT, S, S),
        currency,
    ),
    Known("clock", "Get the time in a city.", ("get_time city", "current_time place", "time_in location"), (S,), clock),
    Known("stock", "Get a stock price.", ("get_stock_price symbol", "stock_quote ticker"), (S,), stock),
    Known("timer", "Set a timer.", ("set_timer minutes", "start_timer minutes"), (INT,), timer),
    Known("todo", "Add an item to the todo list.", ("add_todo text", "todo_add item"), (S,), todo),
    Known("contact", "Find a contact.", ("get_contact name", "find_person name"), (S,), contact),
    Known("fetch", "Fetch a web page.", ("fetch_url url", "WebFetch url", "open_page url"), (S,), fetch),
    Known("news", "Get news about a topic.", ("get_news topic", "news about"), (S,), news),
)
BY_KEY = {tool.key: tool for tool in KNOWN}
AGENT_KITS = (
    (("read", 1), ("write", 1), ("edit", 1), ("shell", 1), ("grep", 1), ("glob", 1), ("list", 1)),
    (("read", 2), ("write", 2), ("edit", 2), ("shell", 0), ("list", 2), ("grep", 0), ("glob", 0)),
    (("read", 0), ("write", 0), ("list", 0), ("shell", 0)),
    (("shell_array", 0), ("todos", 2), ("edit", 3)),
    (("read", 1), ("shell", 1), ("todos", 0), ("fetch", 1), ("search", 2)),
    (("read", 4), ("edit", 3), ("shell", 3)),
)
