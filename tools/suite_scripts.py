"""What a model without mistakes does in outside suites: scripts that show whether a server carries it over.

The suites are those of tools/suites.py; their questions and mock tools are theirs, the answers here are ours.
"""

from __future__ import annotations

from script_lines import answer, calls

REFERENCE_DATE = "2026-03-20"
"""A Friday: "next Monday" is the 23rd."""

_WEEKDAY_CALLS = {
    "title": "Team standup",
    "date": "2026-03-23",
    "time": "09:30",
    "duration_minutes": 30,
    "attendees": ["Alex", "Jamie"],
}
_PHRASE = "Where is the nearest hospital?"

TOOL_EVAL_SHORT: tuple[list[str], ...] = (
    # TC-01 to TC-03
    calls(("get_weather", {"location": "Berlin", "units": "celsius"})),
    answer("It is 8 degrees Celsius and overcast in Berlin."),
    calls(("get_stock_price", {"ticker": "AAPL"})),
    answer("AAPL is at $187.42."),
    calls(("get_contacts", {"query": "Sarah"})),
    calls(
        (
            "send_email",
            {
                "to": "sarah.chen@company.com",
                "subject": "Meeting moved",
                "body": "Hello Sarah, the meeting moved to 3pm.",
            },
        )
    ),
    answer("I told Sarah that the meeting moved to 3pm."),
    # TC-04 to TC-06
    calls(("get_weather", {"location": "Tokyo", "units": "fahrenheit"})),
    answer("It is 64 degrees Fahrenheit in Tokyo."),
    calls(("get_contacts", {"query": "Alex"}), ("get_contacts", {"query": "Jamie"})),
    calls(
        (
            "create_calendar_event",
            {**_WEEKDAY_CALLS, "attendees": ["alex.stone@company.com", "jamie.liu@company.com"]},
        )
    ),
    answer("The standup is on Monday, 2026-03-23, at 09:30 for 30 minutes, with Alex and Jamie."),
    calls(
        *(
            ("translate_text", {"text": _PHRASE, "source_language": "English", "target_language": language})
            for language in ("Spanish", "Japanese")
        )
    ),
    answer("In Spanish: ¿Dónde está el hospital más cercano? In Japanese: 最寄りの病院はどこですか？"),
    # TC-07 to TC-09
    calls(("search_files", {"query": "Q3 budget report"})),
    calls(("read_file", {"file_id": "file_091"})),
    calls(("get_contacts", {"query": "manager"})),
    calls(
        (
            "send_email",
            {
                "to": "jordan.park@company.com",
                "subject": "Q3 budget total",
                "body": "The total of the Q3 budget report is $4.4M.",
            },
        )
    ),
    answer("I sent the Q3 total of $4.4M to Jordan Park, your manager."),
    calls(("get_weather", {"location": "Paris"})),
    calls(("set_reminder", {"message": "Bring an umbrella", "datetime": "2026-03-21T08:00:00"})),
    answer("It rains lightly in Paris, so I set a reminder for tomorrow at 8am to bring an umbrella."),
    calls(("get_weather", {"location": "London"}), ("get_stock_price", {"ticker": "MSFT"})),
    answer("London has 12 degrees and clouds; MSFT is at $412.78."),
    # TC-10 to TC-12
    answer("World War II ended in 1945."),
    answer("15% of 200 is 30."),
    answer("I cannot delete emails: there is no tool for that here. You can delete them in your mail program."),
    # TC-13 to TC-15
    calls(("search_files", {"query": "Johnson proposal"})),
    calls(("search_files", {"query": "Johnson"})),
    answer("I found Johnson_Project_Proposal_v2.docx (file_117)."),
    calls(("get_stock_price", {"ticker": "AAPL"})),
    calls(("web_search", {"query": "AAPL Apple stock price"})),
    answer("The stock service returned an error; a web search says that Apple (AAPL) is around $187.42."),
    calls(("web_search", {"query": "population of Iceland"})),
    calls(("calculator", {"expression": "372520 * 0.02"})),
    answer("2% of Iceland's population of 372,520 is 7450.4."),
)
"""One line for each request of the 15 scenarios of `tool-eval-bench --short`, in their order."""

SMOKE = (
    answer("The answer is 4.", reasoning=""),
    answer("The capital of France is Paris.", reasoning=""),
    answer("The next number is 3.", reasoning=""),
)
"""lucebench's area smoke: three questions, with thinking off."""

LONG_CONTEXT = (answer("Risk: a restart loses the state of running conversations.", reasoning=""),)
"""lucebench's area longctx: six prompts of 2k to 64k tokens, which all want one sentence of this form."""


def _silent(name: str, /, **values: object) -> list[str]:
    """A call with thinking off."""
    return calls((name, values), reasoning="")


FORGE: tuple[list[str], ...] = (
    # basic_2step, sequential_3step, error_recovery
    _silent("get_country_info", country="France"),
    _silent("summarize", content="The capital of France is Paris."),
    _silent("fetch_sales_data", quarter=4, year=2024),
    _silent("analyze_sales"),
    _silent("report", findings="Revenue grew 23% on the year before; Widget Pro sold best, APAC least."),
    _silent("fetch", count="10"),
    _silent("fetch", count="0010"),
    _silent("summarize", content="10 records were fetched."),
    # tool_selection, argument_fidelity, sequential_reasoning
    _silent("lookup_user", name="Alice"),
    _silent("get_permissions", user_id="U-1001"),
    _silent("respond", answer="Alice may read, write and admin the repo forge-dev."),
    _silent("lookup_entity", entity="Widget Pro"),
    _silent("fetch_details", entity_id="ENT-4728"),
    _silent("present", summary="Widget Pro was created on 2024-01-15 and sold 1500 units."),
    _silent("identify_patient", name="John Doe"),
    _silent("get_records", patient_id="PT-7829"),
    _silent("check_interactions", medication="lisinopril"),
    _silent(
        "recommend",
        patient_id="PT-7829",
        findings="Lisinopril with ibuprofen may damage the kidneys; with potassium it may cause hyperkalemia.",
    ),
)
"""One line for each request of the first six workflows of lucebench's area forge."""
FORGE_CASES = 6
